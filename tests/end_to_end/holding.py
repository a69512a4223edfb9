"""A run that trains to a certain step and waits there, so that a test stops or kills it where it wants to.

On a busy machine, and with a run that becomes faster, a kill "soon after step 7" may come after the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpc_train.loggers import metrics_writer as logger_threads
from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.rank import signals
from tests.waiting import HANG_LIMIT_S, came_true

#: The files by which Python knows an installed package: one that has the logger ``holding``.
PACKAGE = {
    "METADATA": "Metadata-Version: 2.1\nName: holding\nVersion: 1\n",
    "entry_points.txt": "[hpc_train.loggers]\nholding = tests.end_to_end.holding:Holding\n",
}


@contextmanager
def held_compiler(folder: Path) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """A C++ compiler, for ``CXX``, that makes no kernel within the context; and whether it was called."""
    held, called, compiler = folder / "held", folder / "called", folder / "g++"
    real = os.environ.get("CXX") or shutil.which("g++")
    wait = f"touch {called}; while [ -e {held} ]; do sleep 0.05; done"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) {wait};; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    held.touch()
    try:
        yield compiler, called.exists
    finally:
        held.unlink()


class Hold:
    """Keeps the run, submitted or resumed with ``override``, after the row of ``step`` or a later one.

    Its ranks go on once they are asked to stop, or at the end of the context.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "held-at"
        self._reached = _reached(self._file)
        self.at(step)

    @property
    def override(self) -> str:
        return f"logging.loggers={{holding: {{file: {self._file}}}}}"

    @property
    def program_override(self) -> str:
        """For a program that waits by itself, such as tests/faults/counting.py."""
        return f"program.env.HELD_AT={self._file}"

    def at(self, step: int, *, since_attempt: int = 1, since_row: int = 1) -> None:
        """Hold the attempts from ``since_attempt`` on after the row of ``step``, and no others.

        ``since_row``: the first row of an attempt at which it may be held.
        """
        self._asked = f"{step} {since_attempt} {since_row}"
        self._reached.unlink(missing_ok=True)
        _replace(self._file, self._asked)

    def is_reached(self) -> bool:
        """Return True if the ranks wait."""
        return self._reached.exists() and self._reached.read_text() == self._asked

    def wait(self, process: subprocess.Popen[str], limit_s: float = HANG_LIMIT_S) -> None:
        """Wait until the ranks of the command ``process`` wait."""
        came_true(lambda: self.is_reached() or process.poll() is not None, limit_s)
        assert process.poll() is None, process.communicate()[1]
        assert self.is_reached(), "the step was not reached"

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _reached(file: Path) -> Path:
    return file.with_suffix(".reached")


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(f".new-{os.getpid()}")
    new.write_text(text)
    new.rename(file)


def _wait_awake(calls: Sequence[Future[Any]], limit_s: float) -> None:
    """Wait for a call of a logger, and let the main thread handle signals meanwhile.

    Of two signals in succession, as Slurm's SIGCONT and SIGTERM, Linux gives the second to another thread if
    the first is still pending for this one, which then sleeps on without having run the second's handler.
    """
    deadline = time.monotonic() + limit_s
    while wait(calls, 0.05).not_done and time.monotonic() < deadline:
        pass


class Holding:
    """The logger that keeps rank 0, whose peers wait for it in the next collective operation."""

    def __init__(self, context: LoggerContext) -> None:
        self._file = Path(context.args["file"])
        self._num_rows = 0
        logger_threads.LIMIT_S = HANG_LIMIT_S  # a logger that does not return sooner would be abandoned
        vars(logger_threads)["wait"] = _wait_awake

    def log(self, row: Row) -> None:
        self._num_rows += 1
        told = ""
        while (asked := self._held_by(row)) and not signals.install():
            if asked != told:
                _replace(_reached(self._file), asked)
                told = asked
            time.sleep(0.02)

    def _held_by(self, row: Row) -> str:
        """Return what ``Hold`` has asked for, if that holds after this row."""
        try:
            asked = self._file.read_text()
        except FileNotFoundError:
            return ""
        step, since_attempt, since_row = map(int, asked.split())
        is_due = row["step"] >= step and row["attempt"] >= since_attempt
        return asked if is_due and self._num_rows >= since_row else ""

    def close(self, state: str) -> None:
        pass
