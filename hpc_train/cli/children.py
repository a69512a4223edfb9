"""Runs what needs torch on behalf of a command, as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hpc_train
from hpc_train.console import say
from hpc_train.errors import ExitCode


def run_child(module: str, *arguments: str, code: Sequence[str] = ()) -> int:
    """Run ``python -m module arguments`` with inherited output; return its exit code.

    ``code``: where it imports from, such as a run's snapshot, instead of here and the current folder.
    """
    # If the package is in a work tree, the child must find the same one from any folder.
    places = code or (str(Path(hpc_train.__file__).parents[1]),)
    path = os.pathsep.join(filter(None, (*places, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} | ({"PYTHONSAFEPATH": "1"} if code else {})
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=False)
    if done.returncode < 0:
        say(f"python -m {module} was killed by signal {-done.returncode}")
        return ExitCode.FAILED
    return done.returncode
