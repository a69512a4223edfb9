"""``metrics.jsonl``: one row a log point, each (split, step) once, whatever happens. Rank 0 only."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpc_train.loggers.base import Row
from hpc_train.run_folder.files import write_text


class MetricsFile:
    """The rows up to the step that this attempt goes on from, and then its own."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        rows = [row for row in read_rows(path) if row["step"] <= resumed_step]
        self._written = {(row["split"], row["step"]) for row in rows}
        write_text(path, "".join(_line(row) for row in rows), sync=True)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Add a row and hand it to the operating system, so that it outlives this process."""
        key = (row["split"], row["step"])
        assert key not in self._written, f"{key} has its row already"
        self._written.add(key)
        self._file.write(_line(row))
        self._file.flush()

    def reopened(self, resumed_step: int) -> MetricsFile:
        """Return the same file, closed before, without the rows past ``resumed_step``."""
        return MetricsFile(self._path, resumed_step)

    def has(self, split: str, step: int) -> bool:
        return (split, step) in self._written

    def sync(self) -> None:
        """Put all rows on the disk: before a checkpoint that takes them for granted."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Return the whole rows of the file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str):
            rows.append(row)
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
