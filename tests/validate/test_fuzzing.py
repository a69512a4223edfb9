"""Whatever stands in a file or on the command line: an experiment, or lines that say what is wrong where.

Nothing else is raised, run, imported or written, and no file takes more memory or time than its limits.
``HPC_TRAIN_FUZZ=100000`` tries so many examples instead of a few.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import REPOSITORY, python

_EXAMPLES = 40
_OURS = {"canary.py", "exp.yaml", "experiment.yaml", "resolved.json"}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.fault(23, 24, 25, 26, 27, 28, 29)
def test_hostile_files_and_overrides_end_in_an_experiment_or_in_errors(tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    num_examples = os.environ.get("HPC_TRAIN_FUZZ", str(_EXAMPLES))
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    words = ("-m", "tests.validate.fuzzing", tmp_path, num_examples)
    done = python(*words, cwd=tmp_path, limit_s=None, PYTHONPATH=path)
    assert done.code == 0, done.err[-6000:]
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__", ".hypothesis"} == _OURS


#: Each in a process of its own, since a watch stays. Written out: ``exec`` would be seen for itself.
_FORBIDDEN = [
    "os.system('true')",
    "subprocess.Popen(['true']).wait()",
    "open('written', 'w')",
    "exec('1')",
    "import canary",
    "os.rename('a', 'b')",
    "socket.socket().close()",
]
_WATCH = """
import os, socket, subprocess
from tests.validate.fuzzing import Watch
def sees(run):
    child = os.fork()
    if child == 0:
        watch = Watch()
        try:
            with watch.watching():
                try: run()
                except OSError: pass
        except AssertionError:
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0
"""


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "canary.py").touch()
    nothing = "len('nothing that is forbidden')"
    tried = [f"def run(): {code}\nprint({code!r} if sees(run) else '')\n" for code in [*_FORBIDDEN, nothing]]
    done = python("-u", "-c", _WATCH + "".join(tried), cwd=tmp_path)
    assert done.out.splitlines() == [*_FORBIDDEN, ""], done.err
