"""``metrics.jsonl``: one JSON object per log point, and never two for a (split, step).

A row has a ``split`` and an integer ``step``; rows are in the order of their steps. Every process reads them
in constant memory, forward or from the end; only rank 0 writes them.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.run.files import UnreadableFileError, open_descriptor, open_regular, replacing, sync_file
from hpc_train.run.storage_errors import named_errors, replaced_file, retried

#: One row of ``metrics.jsonl``.
Row = dict[str, Any]

#: Not metrics: step and time at which a row was recorded.
POSITION = {"time", "attempt", "split", "step", "epoch"}

_BLOCK_BYTES = 1 << 16
#: Times past this, the year 9999, are damaged.
_MAX_TIME_S = 253402300800.0
#: Larger integers are not converted to float: beyond 1e308 that fails.
_MAX_INTEGER = 10**300


def parse_row(line: bytes) -> Row | None:
    """Return the row in a line; None for a line that was cut off or is not a row."""
    if not looks_like_row(line):
        return None
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
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


def newest_row(path: Path) -> Row | None:
    """Return the last row of the file; None without one."""
    with suppress(FileNotFoundError, UnreadableFileError), open_regular(path) as file:
        return next(filter(None, (parse_row(line) for _, line in lines_from_end(file))), None)
    return None


def evaluation_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of evaluations in order. Other lines are not parsed: they are most of a large file."""
    for line in lines_of(path):
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


_COPIED_BYTES = 1 << 20


class MetricsFile:
    """The rows up to the step from which this attempt continues, followed by this attempt's rows.

    Only the rows since the last ``sync`` are in memory: a resume copies the kept lines unchanged, and lines
    that an fsync failed to write are written again. Methods raise StorageError or TransientStorageError.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        #: Split → the step of its newest row, if not before the resumed step.
        self._newest: dict[str, int] = {}
        #: True if the file had rows after ``resumed_step``.
        self.has_withdrawn = False
        # Training appends while the saving thread syncs.
        self._lock = threading.Lock()
        self._unsynced: list[bytes] = []
        with named_errors(path):
            retried(lambda: self._drop_rows_past(resumed_step), path)
            facts = path.stat()
        self._inode, self._end = facts.st_ino, facts.st_size
        self._descriptor: int | None = None

    def _drop_rows_past(self, resumed_step: int) -> None:
        with (
            replacing(self._path, sync=True) as new,
            suppress(FileNotFoundError),
            open_regular(self._path) as file,
        ):
            _copy_rows(file, self._kept_bytes(file, resumed_step), new)

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
        with self._lock, named_errors(self._path):
            retried(lambda: self._write(line), self._path)
            self._unsynced.append(line)

    def _write(self, line: bytes) -> None:
        """Write a line after the last one, over any partial line from a failed try."""
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        try:
            done = 0
            while done < len(line):
                done += os.pwrite(self._descriptor, line[done:], self._end + done)
        except OSError:
            self._close()  # a stale handle stays stale
            raise
        self._end += len(line)

    def _open(self) -> None:
        self._descriptor = open_descriptor(self._path, os.O_WRONLY)
        if os.fstat(self._descriptor).st_ino != self._inode:
            self._close()
            raise OSError(errno.EEXIST, "another attempt has replaced the file", str(self._path))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def reopened(self, resumed_step: int) -> MetricsFile:
        """Return the same file, already closed, without the rows after ``resumed_step``."""
        return MetricsFile(self._path, resumed_step)

    def has(self, split: str, step: int) -> bool:
        """Return True if the file has this row; only for the resumed step and the newest step."""
        return self._newest.get(split) == step

    def sync(self) -> None:
        """Sync all rows to the disk, before a checkpoint that relies on them. Any thread.

        Raises OSError, to which the save adds a path, or StorageError.
        """
        work = [self._sync]

        def once() -> None:
            work.pop()() if work else self._write_again()

        try:
            retried(once, self._path)
        except UnreadableFileError as error:
            raise replaced_file(error) from error

    def _sync(self) -> None:
        with self._lock:
            count = len(self._unsynced)
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            descriptor = os.dup(self._descriptor)  # training may close the original meanwhile
        try:
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            del self._unsynced[:count]

    def _write_again(self) -> None:
        """Replace the file: after a failed fsync, the next fsync of the same file reports success."""
        with self._lock:
            self._close()
            self._open()  # raises if another attempt owns the file
            unsynced = b"".join(self._unsynced)
            with replacing(self._path, sync=True) as new:
                with open_regular(self._path) as old:
                    _copy(old, self._end - len(unsynced), new)
                new.write(unsynced)
            self._close()
            self._unsynced.clear()
            self._inode = self._path.stat().st_ino

    def close(self) -> None:
        """Close the file without syncing it; a later ``append`` opens it again."""
        self._close()


def _copy_rows(old: BinaryIO, size: int, new: BinaryIO) -> None:
    """Copy the first ``size`` bytes, which are whole lines, without lines that are not rows."""
    old.seek(0)
    for line in old:
        if size <= 0:
            return
        size -= len(line)
        if looks_like_row(line):
            new.write(line if line.endswith(b"\n") else line + b"\n")


def _copy(old: BinaryIO, size: int, new: BinaryIO) -> None:
    while size > 0 and (block := old.read(min(size, _COPIED_BYTES))):
        size -= len(block)
        new.write(block)
