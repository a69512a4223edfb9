"""The CSV logger: ``csv/<split>.csv`` in the run folder, one line per row of ``metrics.jsonl``.

A row is written once a checkpoint contains its step, so that no line is removed later. The files are
rewritten from ``metrics.jsonl`` at the start of an attempt and for a new metric; otherwise rows are appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from hpc_train.console import csv_line
from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.run.files import open_regular, replacing
from hpc_train.run.metric_rows import iter_rows

#: The first columns of each table.
_FIRST = ("step", "epoch", "time", "attempt")


class CsvLogger:
    """Writes one table per split: ``step``, ``epoch``, ``time`` and ``attempt`` first, then the metrics.

    A row without a metric has an empty cell, as has a value that is not finite.
    """

    def __init__(self, context: LoggerContext) -> None:
        self._paths = context.paths
        #: Split → the columns of its file.
        self._columns: dict[str, list[str]] = {}
        self._step = -1
        self._waiting: list[Row] = []

    def log(self, row: Row) -> None:
        """Queue a row; it is written once it is final."""
        self._waiting.append(row)

    def rows_withdrawn(self, after_step: int) -> None:
        """Forget the rows past ``after_step``."""
        self._waiting = [row for row in self._waiting if row["step"] <= after_step]
        if self._step > after_step:  # the checkpoint that contained them is damaged
            self._columns.clear()

    def rows_committed(self, up_to_step: int) -> None:
        """Write the rows up to ``up_to_step``."""
        rows = [row for row in self._waiting if row["step"] <= up_to_step]
        self._waiting = self._waiting[len(rows) :]
        self._step = up_to_step
        if self._columns and all(
            row.keys() <= {"split", *self._columns.get(row["split"], ())} for row in rows
        ):
            for split in self._columns:
                lines = _lines((row for row in rows if row["split"] == split), self._columns[split])
                with open_regular(self._file(split), "ab") as file:
                    file.write(lines)
        else:
            self._write_all()

    def close(self, state: str) -> None:
        """Do nothing: rows that are not final are withdrawn or written by the next attempt."""

    def _write_all(self) -> None:
        self._columns = self._found_columns()
        self._paths.csv.mkdir(exist_ok=True)
        for split, columns in self._columns.items():
            with replacing(self._file(split)) as file:
                file.write(csv_line(columns).encode())
                for row in self._final_rows():
                    if row["split"] == split:
                        file.write(_lines([row], columns))

    def _found_columns(self) -> dict[str, list[str]]:
        names_by_split: dict[str, dict[str, None]] = {}
        for row in self._final_rows():
            names = names_by_split.setdefault(row["split"], dict.fromkeys(_FIRST))
            names |= dict.fromkeys(name for name in row if name != "split")
        return {split: list(names) for split, names in names_by_split.items()}

    def _final_rows(self) -> Iterator[Row]:
        return takewhile(lambda row: row["step"] <= self._step, iter_rows(self._paths.metrics))

    def _file(self, split: str) -> Path:
        return self._paths.csv / f"{split}.csv"


def _lines(rows: Iterable[Row], columns: Sequence[str]) -> bytes:
    return "".join(csv_line(row.get(name) for name in columns) for row in rows).encode()
