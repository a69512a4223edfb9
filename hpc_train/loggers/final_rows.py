"""The rows of ``metrics.jsonl`` that are final: no rollback and no resume withdraws them any more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.metric_rows import parse_row


@dataclass(frozen=True)
class FinalRows:
    """The first ``rows`` rows of the file, which are its first ``size`` bytes."""

    rows: int = 0
    size: int = 0
    #: Hash of these bytes, in hexadecimal.
    sha256: str = ""
    #: Step of the last row; -1 without rows.
    step: int = -1

    @classmethod
    def of(cls, paths: RunPaths, *, is_completed: bool) -> FinalRows:
        """Read the rows up to the newest checkpoint, or all of a run that has completed."""
        newest = max((checkpoint.step for checkpoint in committed(paths)), default=-1)
        rows, size, step, digest = 0, 0, -1, hashlib.sha256()
        for line in _lines(paths.metrics):
            row = parse_row(line)
            if row is not None and row["step"] > newest and not is_completed:
                break
            digest.update(line)
            size += len(line)
            if row is not None:
                rows, step = rows + 1, row["step"]
        return cls(rows, size, digest.hexdigest(), step)


def begins_with(metrics: Path, size: int, sha256: str) -> bool:
    """Return True if the file's first ``size`` bytes have this hash."""
    digest = hashlib.sha256()
    for line in _lines(metrics):
        if size < len(line):
            break
        digest.update(line)
        size -= len(line)
    return size == 0 and digest.hexdigest() == sha256


def step_of_row(metrics: Path, number: int) -> int | None:
    """Return the step of a row, counted from 0; None beyond the last row."""
    rows = (row for line in _lines(metrics) if (row := parse_row(line)) is not None)
    row = next(islice(rows, number, None), None)
    return None if row is None else row["step"]


def _lines(metrics: Path) -> Iterator[bytes]:
    """Yield the file's whole lines; none if there is no file."""
    with suppress(FileNotFoundError, UnreadableFileError), open_regular(metrics) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line
