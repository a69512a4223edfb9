"""Runs what needs torch on behalf of a command, as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hpc_train
from hpc_train.console import say
from hpc_train.errors import ExitCode


def run_child(module: str, *arguments: str) -> int:
    """Run ``python -m module arguments`` with inherited output; return its exit code."""
    # If the package is in a work tree, the child must find the same one from any folder.
    root = str(Path(hpc_train.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=os.environ | {"PYTHONPATH": path}, check=False
    )
    if done.returncode < 0:
        say(f"python -m {module} was killed by signal {-done.returncode}")
        return ExitCode.FAILED
    return done.returncode
