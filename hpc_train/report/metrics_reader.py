"""Reads ``metrics.jsonl`` while it grows, and finds the last and the best value of a metric.

A line is parsed only if its row may be needed: the result is the same as if all were parsed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hpc_train.run.best import PREFERRED, goal_of
from hpc_train.run.files import UnreadableFileError, open_regular, read_tail
from hpc_train.run.metric_rows import POSITION, finite, parse_row
from hpc_train.run.metric_rows import Row as Row
from hpc_train.run.run_status import RunStatus

#: Usually contains the newest evaluation. Assumed.
TAIL_BYTES = 1 << 16
#: Size of the blocks that ``spread_rows`` reads: hundreds of rows. Assumed.
_SPREAD_BYTES = 1 << 16
#: Bytes per read when all rows are needed. Assumed.
_BLOCK_BYTES = 1 << 16
#: Longer than any row that hpc-train writes: a file of other content is not read into memory as one line.
_MAX_LINE_BYTES = 1 << 20
_ATTEMPT = b'"attempt":'
#: Occurs in no line.
_NO_ATTEMPT = b"\n\n"


class MetricsReader:
    """Yields each row once; all rows again if the file was replaced.

    ``tail_bytes``: of an existing file, only the rows in its last ``tail_bytes`` bytes are read; None: all.
    ``part``: only lines that contain it are parsed.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None, part: bytes = b"") -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        self._part = part
        self._offset = 0
        #: Of the file that was read last, 0 before the first: another file is read from the start.
        self.inode = 0

    def new_rows(self) -> Iterator[Row]:
        """Yield the complete rows added since the last call; none if there is no file yet."""
        return (row for line in self._new_lines() if self._part in line and (row := parse_row(line)))

    def _new_lines(self) -> Iterator[bytes]:
        """Yield lines one by one: the file of a long run does not fit in memory."""
        try:
            file = open_regular(self._path)
        except (FileNotFoundError, UnreadableFileError):
            return
        with file:
            seen = os.fstat(file.fileno())
            if seen.st_ino != self.inode:  # a resume drops rows after its step: a new file of the same name
                skipped = 0 if self._tail_bytes is None else max(0, seen.st_size - self._tail_bytes)
                # The rest of the line at that offset is not valid JSON, or is that line.
                self.inode, self._offset = seen.st_ino, skipped
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._offset += len(line)
                yield line


def validation_rows(path: Path) -> list[Row]:
    """Return the rows of evaluations. Other lines are not parsed: they are most of a large file."""
    rows = (row for lines in _blocks(path) for row in reversed(list(_rows_from_end(lines, _part_in(lines)))))
    return [row for row in rows if row.get("split") == "val"]


def _part_in(lines: bytes) -> bytes:
    """Return the text that each line of an evaluation row contains, empty if any line may be one."""
    return b"" if b"\\" in lines else b'"val"'


def rows_in(path: Path) -> Iterator[Row]:
    """Yield the complete rows one after the other, in constant memory."""
    return (row for lines in _blocks(path) for line in lines.split(b"\n") if (row := parse_row(line)))


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        data, is_whole = read_tail(path, _BLOCK_BYTES)
        if is_whole:  # as in most of thousands of runs
            yield data[: data.rfind(b"\n") + 1]
            return
        del data
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                if not block.endswith(b"\n"):
                    block += file.readline()
                yield block[: block.rfind(b"\n") + 1]
    except (FileNotFoundError, UnreadableFileError):
        return


def sampled_rows(path: Path, max_rows: int, max_evaluations: int | None = None) -> tuple[list[Row], bool]:
    """Return the rows in order, and whether some were skipped: above ``max_rows``, every k-th is kept.

    Evaluation rows are counted separately, against ``max_evaluations`` (None: ``max_rows``), so that none is
    skipped because of the others. The first and the last row of each attempt (of the first
    ``max_evaluations`` attempts) are always included, and so is the last row of the file. Lines longer than
    any that hpc-train writes are skipped. Memory does not depend on the file's size; no rows if it can't be
    read.
    """
    max_evaluations = max_rows if max_evaluations is None else max_evaluations
    sampled = {True: _Thinned(max_evaluations), False: _Thinned(max_rows)}
    ends: list[tuple[int, bytes]] = []
    last: tuple[int, bytes] | None = None
    attempt = _NO_ATTEMPT
    has_long = is_rest = False
    try:
        with open_regular(path) as file:
            place = 0
            while line := file.readline(_MAX_LINE_BYTES):
                is_end = line.endswith(b"\n")
                if is_end and not is_rest:
                    sampled[b'"val"' in line].add(place, line)
                    if attempt not in line and len(ends) < 2 * max_evaluations:
                        ends += [(place, line)] if last is None else [last, (place, line)]
                        begin = line.find(_ATTEMPT)
                        end = line.find(b",", begin) + 1
                        attempt = line[begin:end] if begin >= 0 and end > 0 else b""
                    place, last = place + 1, (place, line)
                has_long, is_rest = has_long or is_rest, not is_end
    except (OSError, UnreadableFileError):
        return [], False
    lines = dict(chain(sampled[True].lines, sampled[False].lines, ends, [] if last is None else [last]))
    rows = [row for place in sorted(lines) if (row := parse_row(lines[place]))]
    return rows, has_long or any(thinned.every > 1 for thinned in sampled.values())


def spread_rows(path: Path, max_bytes: int) -> tuple[list[Row], float]:
    """Return rows of the file in order, and the share of its bytes that was read, 1.0 for all.

    If the file is larger than ``max_bytes``, the complete rows of evenly spaced blocks are read, including
    the first and the last block, so that the time does not depend on the file's size. Damaged files raise no
    error: ([], 1.0).
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= max_bytes:
                return _complete_rows(file.read(size)), 1.0
            count = max(2, max_bytes // _SPREAD_BYTES)
            begins = [(size - _SPREAD_BYTES) * place // (count - 1) for place in range(count)]
            rows = []
            for begin in begins:
                file.seek(begin)
                # The first line of a block is incomplete, except in the first block.
                block = file.read(_SPREAD_BYTES)
                rows += _complete_rows(block[block.find(b"\n") + 1 if begin else 0 :])
    except (OSError, UnreadableFileError):
        return [], 1.0
    return rows, count * _SPREAD_BYTES / size


def _complete_rows(data: bytes) -> list[Row]:
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    return [row for line in lines if (row := parse_row(line))]


class _Thinned:
    """Every k-th line with its offset in the file; k is the power of two that keeps at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.every = 1
        self._limit = limit
        self._count = 0

    def add(self, place: int, line: bytes) -> None:
        if self._count % self.every == 0:
            self.lines.append((place, line))
            if len(self.lines) > self._limit:
                self.lines, self.every = self.lines[::2], self.every * 2
        self._count += 1


def newest_rows(path: Path, limit_bytes: int = TAIL_BYTES) -> list[Row]:
    """Return the rows at the end of the file that are complete within ``limit_bytes``."""
    return _complete_rows(_tail(path, limit_bytes))


def _tail(path: Path, limit_bytes: int) -> bytes:
    """Return the complete lines within the last ``limit_bytes`` of the file; none if it can't be read."""
    try:
        data, is_whole = read_tail(path, limit_bytes)
    except (OSError, UnreadableFileError):
        return b""
    return data[0 if is_whole else data.find(b"\n") + 1 : data.rfind(b"\n") + 1]


def newest_judged(path: Path) -> list[Row]:
    """Return the newest evaluation at the end of the file, else its newest row, for ``last_metric``.

    The other rows are not parsed, which matters for thousands of runs.
    """
    data = _tail(path, TAIL_BYTES)
    if b'"val"' in data or b"\\" in data:  # the word, or a JSON spelling of it that we do not write
        for row in _rows_from_end(data, _part_in(data)):
            if row.get("split") == "val" and main_metric(row):
                return [row]
    return list(islice(filter(main_metric, _rows_from_end(data)), 1))


def _rows_from_end(data: bytes, part: bytes = b"") -> Iterator[Row]:
    """Yield the rows of the lines that contain ``part``, the last one first."""
    begin = len(data)
    while begin > 0 and (place := data.rfind(part, 0, begin - 1)) >= 0:
        begin = data.rfind(b"\n", 0, place) + 1
        if row := parse_row(data[begin : data.find(b"\n", place)]):
            yield row


def number(value: object) -> float | None:
    """Return a row's value as a float, None if it is not a number or out of range."""
    if type(value) is float:  # most are
        return value
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def metric_value(row: Row, name: str) -> float | None:
    """Return a metric of a row: NaN for null, which rows have for NaN and infinity; None if it has none."""
    return math.nan if name in row and row[name] is None else number(row.get(name))


def main_metric(row: Row) -> str | None:
    """Return the metric that evaluates a row: one of ``PREFERRED``, else an evaluation's first one."""
    preferred = next((name for name in PREFERRED if metric_value(row, name) is not None), None)
    if preferred is not None or row.get("split") != "val":
        return preferred
    return next((name for name in row if name not in POSITION and metric_value(row, name) is not None), None)


def last_metric(rows: Sequence[Row], decisive: str | None = None) -> dict[str, Any] | None:
    """Return ``split``, ``name``, ``value`` and ``step`` of the newest evaluation, else of the newest row.

    ``decisive``: the metric to return if the evaluation has it.
    """
    judged = [row for row in rows if main_metric(row)]
    evaluated = [row for row in judged if row.get("split") == "val"]
    for row in (evaluated or judged)[-1:]:
        name = decisive if decisive in row else main_metric(row)
        value = metric_value(row, name or "")
        assert value is not None
        return {"split": row.get("split"), "name": name, "value": finite(value), "step": row.get("step")}
    return None


def in_words(row: Row) -> str:
    """Return ``loss 0.0123 accuracy 0.98``: the row's metrics."""
    return " ".join(
        f"{name} {value:.4g}"
        for name, value in ((name, metric_value(row, name)) for name in row)
        if name not in POSITION and value is not None
    )


SPLITS = ("val", "train")


@dataclass(frozen=True)
class Metric:
    """A column of ``metrics.jsonl``: ``val/accuracy``."""

    split: str
    name: str
    #: ``min`` or ``max`` if the experiment file says it.
    mode: str | None = field(default=None, compare=False)

    @cached_property
    def goal(self) -> str:
        """``min`` or ``max``: ``mode``, else by the metric's name."""
        return self.mode or goal_of(self.name)

    def __str__(self) -> str:
        return f"{self.split}/{self.name}"


@dataclass(frozen=True)
class Point:
    """A metric's value after a step."""

    #: Null if it is NaN or infinite.
    value: float
    step: int


def decisive_metric(statuses: Iterable[RunStatus]) -> Metric | None:
    """Return the validation metric by which the runs choose their best evaluation; None if they differ."""
    best = [status.best for status in statuses if status.best]
    modes = {str(one.get("metric")): one.get("mode") for one in best}
    return Metric("val", *modes.popitem()) if len(modes) == 1 else None


def metrics_in(rows: Iterable[Row]) -> set[Metric]:
    """Return the metrics that the rows have."""
    return {Metric(str(row.get("split")), name) for row in rows for name in row if name not in POSITION}


def find_metric(
    metrics: Iterable[Metric], wanted: str | None, decisive: Metric | None = None
) -> Metric | None:
    """Return the metric of this name, ``loss`` or ``train/loss``: in validation rows, else in training rows.

    Without ``wanted``, ``decisive`` or the first of ``PREFERRED``. None if ``metrics`` lacks it.
    """
    available = set(metrics)
    return next((metric for metric in candidate_metrics(wanted, decisive) if metric in available), None)


def candidate_metrics(wanted: str | None, decisive: Metric | None = None) -> list[Metric]:
    """Return the metrics that ``find_metric`` tries, in its order."""
    names = PREFERRED if wanted is None else (wanted,)
    metrics = [
        Metric(*name.split("/", 1)) if "/" in name else Metric(split, name)
        for split in SPLITS
        for name in names
    ]
    if decisive is not None and (wanted is None or decisive in metrics):
        metrics.insert(0, decisive)
    return list(dict.fromkeys(metrics))


def last_and_best_of(
    rows: Iterable[Row], metrics: Sequence[Metric]
) -> dict[Metric, tuple[Point | None, Point | None]]:
    """Return ``last_and_best`` of several metrics, whose rows are read once."""
    rows_of_all = list(rows) if len(metrics) > 1 else rows
    return {metric: last_and_best(rows_of_all, metric) for metric in metrics}


def last_and_best(rows: Iterable[Row], metric: Metric) -> tuple[Point | None, Point | None]:
    """Return the metric's newest value, which may be NaN, and its best finite one."""
    last = best = None
    for row in rows:
        if metric.name not in row or row.get("split") != metric.split:
            continue
        value, step = metric_value(row, metric.name), row.get("step")
        if value is None or type(step) is not int:
            continue
        last = Point(value, step)
        if math.isfinite(value) and (best is None or is_better(last, best, metric)):
            best = last
    return last, best


def is_better(one: Point, other: Point, metric: Metric) -> bool:
    """Return True if ``one`` is better than ``other``; both are finite."""
    return one.value < other.value if metric.goal == "min" else one.value > other.value


def sort_key(best: Point | None, metric: Metric) -> float:
    """Return a sort key that puts the best run first, and runs without a value last."""
    if best is None:
        return math.inf
    return best.value if metric.goal == "min" else -best.value
