"""``python -m tests.start_facts``: what a process knows of how it was started, as a line of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path


def facts() -> dict[str, object]:
    died_with = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(died_with))  # PR_GET_PDEATHSIG
    streams = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        kind = (stream.fileno(), stream.encoding, stream.errors, stream.mode, stream.name)
        streams[name] = (*kind, stream.line_buffering, stream.write_through, os.fstat(stream.fileno()).st_ino)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": (__name__, __spec__.name, vars(sys.modules["__main__"])["__file__"]),
        "names": sorted(vars(sys.modules["__main__"])),
        "environ": dict(os.environ),
        "proc environ": sorted(filter(None, Path("/proc/self/environ").read_text().split("\0"))),
        "proc cmdline": Path("/proc/self/cmdline").read_text().rstrip("\0"),
        "folder": str(Path.cwd()),
        "temporary folder": tempfile.gettempdir(),
        "umask": (mask := os.umask(0), os.umask(mask))[0],
        "parent": os.getppid(),
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "handlers": {
            number.name: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.Signals
        },
        "died with": died_with.value,
        "files": [number for number in range(256) if Path(f"/proc/self/fd/{number}").exists()],
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "limits": Path("/proc/self/limits").read_text(),
        "has torch": "torch" in sys.modules,
        "streams": streams,
        "package": package(),
    }  # fmt: skip


def package() -> dict[str, object]:
    """Return where hpc_train comes from."""
    from hpc_train import errors
    from hpc_train.launchers.slurm import profiles
    from hpc_train.run import tracebacks

    modules = (sys.modules["hpc_train"], errors, profiles, tracebacks)
    return {
        "files": [(module.__file__, module.__cached__, module.__spec__.origin) for module in modules],
        "folders": (list(sys.modules["hpc_train"].__path__), list(sys.modules["hpc_train.run"].__path__)),
        "paths": (str(profiles.TEMPLATES), tracebacks._PACKAGE),
        "code": (errors.BadFileError.__init__.__code__.co_filename, profiles.__loader__.path),
        "planted": vars(errors).get("PLANTED"),
    }


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
    if sys.argv[1] == "wait":
        signal.pause()
    sys.exit(7)
