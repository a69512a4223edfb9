"""Processes that submit, and die or wait at a step that a test names."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import warm

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Halt:
    """Where the submitter stops: before or after a call, the n-th, of a function that its module looks up."""

    #: ``module:function``.
    function: str
    call: int
    when: str
    #: Killed there; else it writes ``<file>.there`` and waits until ``file`` exists.
    wait_for: str | None = None

    def __str__(self) -> str:
        return f"{self.when} {self.function.rpartition('.')[2]} {self.call}"


def start(
    folder: Path, *arguments: str, halt: Halt | None = None, program: Path | None = None
) -> subprocess.Popen[str]:
    """Start ``hpc-train`` in ``folder``; ``program``: a folder whose programs come first."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if program is not None:
        environment["PATH"] = f"{program}:{environment['PATH']}"
    return warm.start_module(
        "tests.slurm.submitters",
        json.dumps(halt and asdict(halt)),
        *arguments,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _halt(halt: Halt) -> None:
    if halt.wait_for is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    Path(f"{halt.wait_for}.there").touch()
    while not Path(halt.wait_for).exists():
        time.sleep(0.05)


def _halting(function: Callable[..., Any], halt: Halt) -> Callable[..., Any]:
    calls = itertools.count(1)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        call = next(calls)  # several threads may call
        if call == halt.call and halt.when == "before":
            _halt(halt)
        result = function(*arguments, **keywords)
        if call == halt.call and halt.when == "after":
            _halt(halt)
        return result

    return wrapped


def main() -> None:
    from hpc_train.cli.app import app

    if said := json.loads(sys.argv[1]):
        halt = Halt(**said)
        module_name, _, name = halt.function.partition(":")
        module = importlib.import_module(module_name)
        setattr(module, name, _halting(getattr(module, name), halt))
    app(args=sys.argv[2:], prog_name="hpc-train")


if __name__ == "__main__":
    main()
