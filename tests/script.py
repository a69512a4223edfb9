"""``python -m tests.script TEXT …`` is ``python -c TEXT …``: for processes that tests/warm.py forks."""

import sys
import types

text = sys.argv.pop(1)
sys.argv[0] = "-c"
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(text, "<string>", "exec"), vars(sys.modules["__main__"]))
