"""The thread that reads runs and queries schedulers, so that keys work meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.report.live.details import Details, DetailsReader
from hpc_train.report.live.live_runs import LiveRun, RunsReader
from hpc_train.run.storage_errors import error_words


@dataclass(frozen=True)
class Reading:
    """The result of one reading. ``details``: of the selected run, if there is one."""

    runs: list[LiveRun]
    details: Details | None
    #: Why something could not be read; the rest is unchanged.
    problem: str = ""


class ReadingThread(threading.Thread):
    """Reads every ``interval_s`` seconds, and at once when something else is selected.

    Daemonic: a file server or scheduler that does not answer does not delay exit.
    """

    def __init__(self, reader: RunsReader, interval_s: float, deliver: Callable[[Reading], object]) -> None:
        super().__init__(name="reading runs", daemon=True)
        self._reader, self._interval_s, self._deliver = reader, interval_s, deliver
        self._condition = threading.Condition()
        self._selected: RunPaths | None = None
        self._is_full = self._wants_runs = self._is_stopped = False
        self._wants_details = False
        self._details: DetailsReader | None = None
        self._runs: list[LiveRun] = []

    def select(self, paths: RunPaths | None, *, is_full: bool) -> None:
        """Read the details of this run from now on."""
        with self._condition:
            if (paths, is_full) != (self._selected, self._is_full):
                self._selected, self._is_full, self._wants_details = paths, is_full, True
                self._condition.notify()

    def read_now(self) -> None:
        """Read everything without waiting for the next time."""
        with self._condition:
            self._wants_runs = True
            self._condition.notify()

    def stop(self) -> None:
        """End the thread after it has delivered its current reading; return at once."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()

    def run(self) -> None:
        """Read and deliver until ``stop``."""
        while not self._is_stopped:
            due_s = time.monotonic() + self._interval_s
            self._deliver(self._read(with_runs=True))
            while self._wait(due_s):
                self._deliver(self._read(with_runs=False))

    def _wait(self, due_s: float) -> bool:
        """Wait until ``due_s`` or a request; return True if only details are requested."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._wants_runs or self._wants_details or self._is_stopped,
                max(0.0, due_s - time.monotonic()),
            )
            details_alone = self._wants_details and not self._wants_runs and not self._is_stopped
            self._wants_runs = self._wants_details = False
            return details_alone

    def _read(self, *, with_runs: bool) -> Reading:
        problem = ""
        try:
            self._runs = self._reader.read() if with_runs else self._runs
            details = self._read_details()
        except Exception as error:  # an error of a plug-in or a disk: shown, and retried
            details, problem = None, problem_words(error)
        return Reading(self._runs, details, problem)

    def _read_details(self) -> Details | None:
        with self._condition:
            selected, is_full = self._selected, self._is_full
        run = next((run for run in self._runs if run.paths == selected), None)
        if run is None:
            return None
        if self._details is None or self._details.paths != run.paths:
            self._details = DetailsReader(run.paths)
        return self._details.read(run, is_full=is_full)


def problem_words(error: Exception) -> str:
    """Return why something could not be read."""
    if isinstance(error, OSError):
        return error_words(error)
    return str(error) if isinstance(error, HpcTrainError) else f"{type(error).__name__}: {error}"
