"""Writes the rows of a run: of our trainer, and of programs.

Each logger is called in its own thread, so that a hanging logger delays the run by seconds, not forever. A
call waits until the logger has returned, up to a time limit. After that the logger is abandoned: it is never
called again, and its thread is a daemon.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, TextIO, TypeVar, cast

from hpc_train import registry
from hpc_train.experiment.config.schema import Job
from hpc_train.loggers import base
from hpc_train.loggers.base import Logger, LoggerContext, Row
from hpc_train.paths import RunPaths
from hpc_train.redaction import redacted
from hpc_train.run.files import read_json
from hpc_train.run.metric_rows import MetricsFile, finite

#: Time limit of all loggers together for a row, a checkpoint or their end.
LIMIT_S = 10.0
#: Time limit for importing and constructing one, which may read from a slow disk. Assumed.
START_LIMIT_S = 120.0
#: Maximum of a logger's own limit at the end.
_MAX_OWN_LIMIT_S = 90.0
#: The end of each warning about a lost logger.
CONTINUES = "training continues, metrics.jsonl has every row"
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes rank 0's rows to metrics.jsonl, to the loggers and as plain lines to ``log``, if there is one.

    ``images_at``: step → name → image file of its evaluation, for the loggers.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        loggers: Sequence[Logger | LoggerThread],
        log: TextIO | None,
        images_at: Callable[[int], Mapping[str, Path]] = lambda step: {},
    ) -> None:
        self.metrics = metrics
        #: State of the run that the loggers receive at ``close``.
        self.state = "failed"
        self._loggers = [
            logger if isinstance(logger, LoggerThread) else LoggerThread.around(logger) for logger in loggers
        ]
        self._log = log
        self._images_at = images_at
        #: Steps of the rows that ``join`` has added.
        self._joined: set[int] = set()

    def write(self, row: Row) -> None:
        """Write a row, with null for numbers that are not finite."""
        row = finite(row)
        self.metrics.append(row)
        self._each_logger(lambda logger: logger.log(row))
        if row["split"] == "val" and (images := self._images_at(row["step"])):
            self._each_logger(
                lambda logger: logger.log_images(row, images) if isinstance(logger, base.LogsImages) else None
            )
        if self._log is None:
            return
        values = [
            f"{name} {value:.5g}"
            for name, value in row.items()
            if isinstance(value, float) and name != "time"
        ]
        print(f"{row['split']} step {row['step']} {' '.join(values)}", file=self._log, flush=True)

    def begin(self, step: int) -> None:
        """Notify the loggers that training continues from ``step``, with the file's rows."""
        if self.metrics.has_withdrawn:
            self._each_logger(
                lambda logger: logger.rows_withdrawn(step) if isinstance(logger, base.WithdrawsRows) else None
            )
        self.committed(step)

    def go_back(self, step: int) -> None:
        """Drop the rows after ``step``, from which training continues."""
        self.metrics.close()
        self.metrics = self.metrics.reopened(step)
        self.begin(step)

    def join(self, evaluated: Mapping[int, Row], step: int) -> None:
        """Add the rows up to ``step`` of evaluations by other jobs to the file, unless it has them."""
        rows = {at: row for at, row in evaluated.items() if at <= step}
        if rows.keys() <= self._joined or self.metrics.is_replaced:
            return
        self._joined |= rows.keys()
        self.metrics.close()
        self.metrics = self.metrics.reopened(sys.maxsize, rows)

    def committed(self, step: int) -> None:
        """Notify the loggers that no rollback or resume can withdraw the rows up to ``step`` any more."""
        self._each_logger(
            lambda logger: logger.rows_committed(step) if isinstance(logger, base.AwaitsCommit) else None
        )

    def close(self) -> None:
        """Close the file, then the loggers, which receive ``state``."""
        self.metrics.close()
        self._each_logger(lambda logger: logger.close(self.state), is_last=True)
        for thread in self._loggers:
            thread.end()

    def _each_logger(self, work: Callable[[Logger], None], *, is_last: bool = False) -> None:
        """Call ``work`` with every logger; a logger that raises or hangs is reported once and dropped."""
        for thread, error in call_all(self._loggers, work, is_last=is_last):
            self._loggers.remove(thread)
            if isinstance(error, HangingLoggerError):
                _log.warning("logger %s is abandoned: %s; %s", thread.name, error, CONTINUES)
                continue
            thread.end()
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            _log.warning(
                "logger %s failed and is disabled\n%s", thread.name, redacted("".join(lines).rstrip())
            )


class HangingLoggerError(Exception):
    """A logger has not returned in time."""


class LoggerThread:
    """A logger and the thread in which it is constructed and called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._logger: Logger | None = None
        threading.Thread(target=self._run, name=f"logger {name}", daemon=True).start()

    @classmethod
    def around(cls, logger: Logger) -> LoggerThread:
        """Return the thread of a logger that was constructed elsewhere."""
        thread = cls(type(logger).__name__)
        thread._logger = logger
        return thread

    def construct(self, make: Callable[[], Logger | None]) -> bool:
        """Construct the logger; False if there is none. Raises HangingLoggerError."""
        future = self._submit(make)
        wait([future], START_LIMIT_S)
        if not future.done():
            raise HangingLoggerError(f"it was not constructed within {START_LIMIT_S:g} s")
        self._logger = future.result()
        if self._logger is None:
            self.end()
        return self._logger is not None

    def begin(self, work: Callable[[Logger], None]) -> Future[None]:
        """Start a call of the logger, without waiting for it."""
        logger = self._logger
        assert logger is not None, "it was constructed"
        return self._submit(lambda: work(logger))

    def end(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    @property
    def close_limit_s(self) -> float:
        """Time limit of the logger's ``close``."""
        requested = self._logger.close_limit_s if isinstance(self._logger, base.LimitsItself) else 0.0
        return max(LIMIT_S, min(requested, _MAX_OWN_LIMIT_S))

    def _submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()

        def call() -> None:
            try:
                future.set_result(work())
            except (Exception, SystemExit) as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def start_loggers(job: Job, paths: RunPaths, attempt: int) -> list[LoggerThread]:
    """Return the file's loggers, each in its thread, except those that can't be started in time."""
    run, threads = read_json(paths.run) or {}, []
    for name, args in job.logging.arguments_by_logger().items():
        context = LoggerContext(job, paths, run["id"], attempt, run["wandb_id"], args)
        if (thread := start_logger(name, context)) is not None:
            threads.append(thread)
    return threads


def start_logger(name: str, context: LoggerContext) -> LoggerThread | None:
    """Return the logger of this name in its thread; None, with a warning, if it can't be started in time."""
    thread = LoggerThread(name)
    try:
        return thread if thread.construct(lambda: make_logger(name, context)) else None
    except HangingLoggerError as error:
        _log.warning("logger %s is abandoned: %s; %s", name, error, CONTINUES)
        return None


def make_logger(name: str, context: LoggerContext) -> Logger | None:
    """Return the logger of this name; None, with a warning, if it can't be imported or constructed."""
    try:
        return cast(Logger, cast(Any, registry.load("loggers", name))(context))
    except base.LoggerOffError as off:
        print(f"{name}: {off}", flush=True)
        return None
    except (Exception, SystemExit):
        _log.warning(
            "logger %s can't be started and receives nothing from this attempt; %s\n%s",
            name,
            CONTINUES,
            redacted(traceback.format_exc().rstrip()),
        )
        return None


def call_all(
    threads: Sequence[LoggerThread], work: Callable[[Logger], None], *, is_last: bool = False
) -> list[tuple[LoggerThread, BaseException]]:
    """Call all loggers at the same time; return the loggers that failed or hang, and their errors.

    ``is_last``: for ``close``, for which a logger may have its own limit.
    """
    begun_at, failed = monotonic(), list[tuple[LoggerThread, BaseException]]()
    calls: list[tuple[LoggerThread, Future[Any]]] = [(thread, thread.begin(work)) for thread in threads]
    for thread, call in calls:
        limit_s = thread.close_limit_s if is_last else LIMIT_S
        wait([call], max(0.0, begun_at + limit_s - monotonic()))
        if not call.done():
            failed.append((thread, HangingLoggerError(f"it did not return within {limit_s:g} s")))
        elif (error := call.exception()) is not None:
            failed.append((thread, error))
    return failed
