"""``metrics.jsonl``: one JSON object per log point, and never two for a (split, step).

A row has a ``split`` and an integer ``step``; rows are in the order of their steps. Every process reads them
in constant memory, forward or from the end; only rank 0 writes them.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from typing_extensions import override

from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.growing_file import GrowingFile

#: One row of ``metrics.jsonl``.
Row = dict[str, Any]

#: Not metrics: step and time at which a row was recorded.
POSITION = {"time", "attempt", "split", "step", "epoch"}

_BLOCK_BYTES = 1 << 16
#: Times past this, the year 9999, are damaged.
_MAX_TIME_S = 253402300800.0
#: ``json.loads`` does the same, but looks for spaces around the value, too.
_decode = json.JSONDecoder().raw_decode
#: Larger integers are not converted to float: beyond 1e308 that fails.
_MAX_INTEGER = 10**300


def parse_row(line: bytes) -> Row | None:
    """Return the row in a line; None for a line that was cut off or is not a row."""
    if not looks_like_row(line):
        return None
    try:
        text = line.decode("utf-8", errors="replace")
        row, end = _decode(text)
    except (ValueError, RecursionError):
        return None
    if text[end:].strip(" \t\r\n"):
        return None
    if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str):
        return row
    return None


def looks_like_row(line: bytes) -> bool:
    """Return True if a line may contain a row; does not parse it."""
    return line.startswith(b"{") and line.rstrip().endswith(b"}") and b'"step"' in line and b'"split"' in line


def time_of(row: Row) -> float | None:
    """Return when a row was recorded, in seconds since 1970; None if it has no valid time."""
    time = row.get("time")
    if isinstance(time, bool) or not isinstance(time, (int, float)):
        return None
    return float(time) if abs(time) < _MAX_TIME_S else None


def numbers(row: Row) -> dict[str, float]:
    """Return the metrics of a row that are numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in POSITION
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (isinstance(value, float) or abs(value) < _MAX_INTEGER)
    }


def finite(value: Any) -> Any:
    """Return a JSON value with None in place of infinite numbers and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unusable_lines(path: Path, last_step: int, *, needs_time: bool) -> Iterator[tuple[int, str]]:
    """Yield (number, problem) of the lines up to ``last_step`` that are not a row, or one without a time."""
    for number, line in enumerate(lines_of(path), 1):
        row = parse_row(line)
        if row is None and line.endswith(b"\n") and line.strip():
            yield number, "is not a row"
        elif row is not None and row["step"] > last_step:
            return
        elif row is not None and needs_time and time_of(row) is None:
            yield number, "has no valid time"


def iter_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of the file in order; none if there is no file."""
    yield from filter(None, map(parse_row, lines_of(path)))


def rows_from_end(path: Path) -> Iterator[Row]:
    """Yield the rows of the file, the last one first; none if there is no file."""
    with suppress(FileNotFoundError, UnreadableFileError), open_regular(path) as file:
        yield from filter(None, (parse_row(line) for _, line in lines_from_end(file)))


def newest_row(path: Path) -> Row | None:
    """Return the last row of the file; None without one."""
    return next(rows_from_end(path), None)


def evaluation_rows(path: Path) -> Iterator[Row]:
    """Return the rows of evaluations in order. Other lines are not parsed: they are most of a large file."""
    return _evaluation_rows(lines_of(path))


def _evaluation_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        if b'"val"' in line and (row := parse_row(line)) and row["split"] == "val":
            yield row


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file in order; none if there is no file."""
    try:
        file = open_regular(path)
    except (FileNotFoundError, UnreadableFileError):
        return
    with file:
        yield from file


def lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the file's lines, the last one first; only the last may lack its line break."""
    begin = file.seek(0, os.SEEK_END)
    pending = b""  # the first line of the blocks read so far, which may begin in an earlier block
    while begin > 0:
        size = min(_BLOCK_BYTES, begin)
        begin -= size
        file.seek(begin)
        lines = io.BytesIO(file.read(size) + pending).readlines()
        pending = lines[0]
        end = begin + sum(len(line) for line in lines)
        for line in reversed(lines[1:]):
            end -= len(line)
            yield end, line
    if pending:
        yield 0, pending


class MetricsFile(GrowingFile):
    """The rows up to the step from which this attempt continues, followed by this attempt's rows.

    A resume copies the kept lines unchanged. ``evaluated``: step → ``val`` row of evaluations by other jobs;
    those up to the resumed step are added in the order of steps if the file does not have them.
    """

    def __init__(
        self, path: Path, resumed_step: int, evaluated: Mapping[int, Row] = MappingProxyType({})
    ) -> None:
        #: Split → the step of its newest row, if not before the resumed step.
        self._newest: dict[str, int] = {}
        #: True if the file had rows after ``resumed_step``.
        self.has_withdrawn = False
        self._resumed_step = resumed_step
        self._evaluated = {step: row for step, row in evaluated.items() if step <= resumed_step}
        if resumed_step in self._evaluated:
            self._newest["val"] = resumed_step
        super().__init__(path)

    @override
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        size = self._kept_bytes(old, self._resumed_step)
        old.seek(0)
        lines = _first_lines(old, size if self._evaluated else 0)
        recorded = {row["step"] for row in _evaluation_rows(lines)}
        missing = [row for step, row in sorted(self._evaluated.items()) if step not in recorded]
        old.seek(0)
        _copy_rows(_first_lines(old, size), new, missing)

    def _kept_bytes(self, file: BinaryIO, resumed_step: int) -> int:
        """Return the end offset of the rows up to ``resumed_step``, and record the rows of that step."""
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
        """Write a row to the operating system, so that it survives a crash of this process."""
        key = (row["split"], row["step"])
        assert row["step"] > self._newest.get(row["split"], -1), f"{key} has its row already"
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._newest[row["split"]] = row["step"]
        self.write(line)

    def reopened(self, resumed_step: int, evaluated: Mapping[int, Row] = MappingProxyType({})) -> MetricsFile:
        """Return the same file, already closed, without the rows after ``resumed_step``."""
        return MetricsFile(self._path, resumed_step, evaluated)

    def has(self, split: str, step: int) -> bool:
        """Return True if the file has this row; only for the resumed step and the newest step."""
        return self._newest.get(split) == step


def _first_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    for line in file if size > 0 else ():
        yield line
        size -= len(line)
        if size <= 0:
            return


def _copy_rows(lines: Iterable[bytes], new: BinaryIO, missing: Sequence[Row]) -> None:
    """Copy the lines that are rows, and write each row of ``missing`` after those of its step.

    Rows of a file are in the order of their times, so a missing row gets the time of the row before it.
    """
    waiting, before = deque(missing), Row()

    def write_waiting(before_step: float) -> None:
        while waiting and waiting[0]["step"] < before_step:
            row = waiting.popleft() | ({"time": before["time"]} if "time" in before else {})
            new.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    for line in lines:
        if not looks_like_row(line):
            continue
        if waiting and (row := parse_row(line)) is not None:
            write_waiting(row["step"])
            before = row
        new.write(line if line.endswith(b"\n") else line + b"\n")
    write_waiting(math.inf)
