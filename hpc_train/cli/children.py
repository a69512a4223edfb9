"""Runs a command's work that needs torch in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.console import say
from hpc_train.errors import ExitCode
from hpc_train.package_path import PACKAGE_PARENT, answer_in, with_package


def run_child(module: str, *arguments: str, code: Sequence[str] = ()) -> int:
    """Run ``python -m module arguments`` with inherited output; return its exit code.

    ``code``: folders to import from, such as a run's snapshot, instead of this package's and the current one.
    """
    return _run(module, arguments, code, None)[0]


def child_report(module: str, *arguments: str, code: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Return the exit code of ``run_child``, and the last JSON object that the child has printed as a line.

    The object is empty if the child failed. Other lines, such as output of the user's code, go to stderr.
    """
    exit_code, output = _run(module, arguments, code, subprocess.PIPE)
    answer = answer_in(output) if exit_code == 0 else None
    lines = output.rstrip("\n").split("\n")
    if answer is not None:
        del lines[max(index for index, line in enumerate(lines) if answer_in(line) is not None)]
    if "".join(lines):
        say(*lines)
    return exit_code, answer or {}


def _run(module: str, arguments: Sequence[str], code: Sequence[str], stdout: int | None) -> tuple[int, str]:
    # If the package is in a work tree, the child must find the same one from any folder.
    environment = with_package(os.environ, code or (PACKAGE_PARENT, str(Path.cwd())))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=stdout,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode < 0:
        say(f"python -m {module} was killed by signal {-done.returncode}")
        return ExitCode.FAILED, done.stdout or ""
    return done.returncode, done.stdout or ""
