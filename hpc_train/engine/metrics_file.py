"""``metrics.jsonl``: a row per log point, each (split, step) once, whatever happens. Rank 0 only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from hpc_train.run_folder.files import replacing
from hpc_train.run_folder.metric_rows import Row, iter_rows, lines_from_end, looks_like_row, parse_row


class MetricsFile:
    """The rows up to the step from which this attempt continues, and then its own.

    Holds no rows in memory: a resume copies the kept lines as they are.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        #: Split → the step of its newest row, where that is the resumed step or a later one.
        self._newest: dict[str, int] = {}
        #: Whether rows past ``resumed_step`` were in the file.
        self.has_withdrawn = False
        with replacing(path, sync=True) as new:
            if path.exists():
                with path.open("rb") as old:
                    _copy_rows(old, self._kept_bytes(old, resumed_step), new)
        self._file = path.open("a", encoding="utf-8")

    def _kept_bytes(self, file: BinaryIO, resumed_step: int) -> int:
        """Return where the rows up to ``resumed_step`` end, and note those at that very step."""
        end = 0
        for offset, line in lines_from_end(file):
            row = parse_row(line)
            if row is None:
                continue
            if row["step"] > resumed_step:
                self.has_withdrawn = True
                continue
            end = max(end, offset + len(line))
            if row["step"] < resumed_step:
                break
            self._newest[row["split"]] = resumed_step
        return end

    def append(self, row: Row) -> None:
        """Add a row and hand it to the operating system, so that it outlives this process."""
        key = (row["split"], row["step"])
        assert row["step"] > self._newest.get(row["split"], -1), f"{key} has its row already"
        line = _line(row)
        self._newest[row["split"]] = row["step"]
        self._file.write(line)
        self._file.flush()

    def reopened(self, resumed_step: int) -> MetricsFile:
        """Return the same file, closed before, without the rows past ``resumed_step``."""
        return MetricsFile(self._path, resumed_step)

    def has(self, split: str, step: int) -> bool:
        """Tell whether the row of the resumed step, or of the newest since, is in the file."""
        return self._newest.get(split) == step

    def sync(self) -> None:
        """Put all rows on the disk: before a checkpoint that takes them for granted."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _copy_rows(old: BinaryIO, size: int, new: BinaryIO) -> None:
    """Copy the first ``size`` bytes, whole lines, without those that are not rows."""
    old.seek(0)
    for line in old:
        if size <= 0:
            return
        size -= len(line)
        if looks_like_row(line):
            new.write(line if line.endswith(b"\n") else line + b"\n")


def read_rows(path: Path) -> list[Row]:
    """Return all rows of the file; a last line that was cut off is not among them."""
    return list(iter_rows(path))


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
