"""What ``metrics.jsonl`` says, read while it grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpc_train.run_folder.files import UnreadableFileError, open_regular

#: One row of ``metrics.jsonl``.
Row = dict[str, Any]
#: Not metrics: where and when a row was taken.
_POSITION = {"time", "attempt", "split", "step", "epoch"}


class MetricsReader:
    """Yields each row once; all of them again where the file was written anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new_rows(self) -> list[Row]:
        """Return the whole rows that came since the last call; none where there is no file yet."""
        try:
            with open_regular(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # a resume drops rows past its step: a new file under the name
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, UnreadableFileError):
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line))]


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def validation_rows(path: Path) -> list[Row]:
    """Return the rows of evaluations."""
    return [row for row in MetricsReader(path).new_rows() if row.get("split") == "val"]


def told(row: Row) -> str:
    """Return ``loss 0.0123 accuracy 0.98``: the row's metrics."""
    return " ".join(
        f"{name} {value:.4g}"
        for name, value in row.items()
        if name not in _POSITION and isinstance(value, int | float)
    )
