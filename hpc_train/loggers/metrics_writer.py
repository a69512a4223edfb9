"""Writes the rows of a run: of our trainer, and of programs."""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hpc_train.loggers.base import AwaitsCommit, Logger, LogsImages, Row, WithdrawsRows
from hpc_train.loggers.threads import CONTINUES, HangingLoggerError, LoggerThread, call_all
from hpc_train.redaction import redacted
from hpc_train.run.metric_rows import MetricsFile

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
        row = without_non_finite(row)
        self.metrics.append(row)
        self._each_logger(lambda logger: logger.log(row))
        if row["split"] == "val" and (images := self._images_at(row["step"])):
            self._each_logger(
                lambda logger: logger.log_images(row, images) if isinstance(logger, LogsImages) else None
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
                lambda logger: logger.rows_withdrawn(step) if isinstance(logger, WithdrawsRows) else None
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
            lambda logger: logger.rows_committed(step) if isinstance(logger, AwaitsCommit) else None
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


def without_non_finite(row: Row) -> Row:
    """Return the row with None (null in JSON) in place of infinite numbers and NaN, which JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
