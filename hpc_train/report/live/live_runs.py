"""The runs on the screen: ``RunsReader`` reads them repeatedly at low cost; the rest makes their table.

A file is opened only if its size, inode or modification time has changed, and reading of metrics continues at
the end of the last reading.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_train.console import STATE_STYLES, one_line
from hpc_train.errors import UsageError, shortened
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths, runs_root
from hpc_train.report import changed_keys, metrics_reader, run_files
from hpc_train.report.metrics_reader import Row, number
from hpc_train.run.attempts import AttemptRecord, job_ids
from hpc_train.run.find import find_and_skip, is_run, run_names
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import GOING_ON, STATES, RunStatus, extension_words, recorded_values, run_facts

#: Number of training rows whose losses are drawn and whose rate is averaged.
HISTORY = 60
#: Seconds between queries about a run that has ended and whose files do not change: a user may requeue it.
ENDED_EVERY_S = 60.0
#: Inode, size and modification time; None: the file does not exist.
_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class LiveRun:
    """A run as described by its files and its scheduler. Its texts are not safe for a terminal."""

    paths: RunPaths
    #: The name that every command accepts.
    name: str
    experiment: str
    status: RunStatus
    #: The swept keys with the run's values, and the runs that it extends or that extend it:
    #: ``lr=0.01 seed=1, extends 3f… from step 80``; empty if there is neither.
    values: str = ""
    #: UTC, ISO 8601: the start of the newest attempt or, before the first, of the run's creation.
    since: str = ""
    job: str | None = None
    nodes: tuple[str, ...] = ()
    #: Seconds until the last step; None if unknown.
    eta_s: float | None = None
    #: Losses of the newest training rows, the newest last, including NaN and infinite values.
    losses: tuple[float, ...] = ()
    #: The newest row of training and of an evaluation.
    train: Row = field(default_factory=dict)
    evaluation: Row = field(default_factory=dict)

    @property
    def state(self) -> str:
        """One of ``run_status.STATES``."""
        return self.status.state

    @property
    def share(self) -> float:
        """The share of completed steps, 0 if unknown."""
        total = self.status.total_steps
        return min(1.0, max(0.0, self.status.step / total)) if total else 0.0

    @property
    def rate(self) -> tuple[float, str] | None:
        """Samples or, if rows have none, steps per second, and that unit."""
        samples, step_s = number(self.train.get("samples_per_s")), number(self.train.get("step_s"))
        if samples is not None:
            return samples, "samples/s"
        return (1 / step_s, "steps/s") if step_s and step_s > 0 else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization in the newest training row, 0…1; None if the row has none."""
        return number(self.train.get("mfu"))

    @property
    def data_wait(self) -> float | None:
        """The share of a step in which training waits for data."""
        wait_s, step_s = number(self.train.get("data_wait_s")), number(self.train.get("step_s"))
        return None if wait_s is None or not step_s else wait_s / step_s

    @property
    def metric(self) -> tuple[str, float | None] | None:
        """The judged metric of the newest evaluation, else of the newest training row."""
        rows = [row for row in (self.train, self.evaluation) if row]
        decisive = metrics_reader.decisive_metric([self.status])
        newest = metrics_reader.last_metric(rows, decisive.name if decisive else None)
        return None if newest is None else (str(newest["name"]), newest["value"])


class RunsReader:
    """Reads the runs that ``selectors`` name, or all without any, at each call."""

    def __init__(self, selectors: Sequence[str]) -> None:
        self._selectors = list(selectors)
        self._tracked: dict[RunPaths, _TrackedRun] = {}
        self._names: Mapping[RunPaths, str] = {}
        self._folders: tuple[object, ...] = ()

    def read(self) -> list[LiveRun]:
        """Return the current state of the runs; a scheduler is queried once for all of its runs.

        Raises UserError if a launcher fails, OSError for errors of the disk.
        """
        self._find()
        now_s = time.monotonic()
        runs = [self._tracked.setdefault(paths, _TrackedRun(paths)) for paths in self._names]
        due = [run for run in runs if run.is_due(now_s)]
        for run, status in zip(due, statuses([run.paths for run in due]), strict=True):
            run.set_status(status, now_s)
        return [run.shown(self._names[run.paths]) for run in runs]

    def _find(self) -> None:
        folders = _stamps_of_folders(self._selectors)
        if folders == self._folders:
            return
        try:
            runs = find_and_skip(self._selectors)[0]
        except UsageError:  # the run that a word means was removed
            runs = [paths for paths in self._names if is_run(paths)]
        self._folders, self._names = folders, run_names(runs)
        self._tracked = {paths: run for paths, run in self._tracked.items() if paths in self._names}


def _stamps_of_folders(selectors: Sequence[str]) -> tuple[object, ...]:
    """Return a value that changes when a run is created or removed."""
    root = runs_root()
    folders = [root, *(Path(word) for word in selectors if os.sep in word)]
    with suppress(OSError), os.scandir(root) as entries:
        folders += [Path(entry) for entry in entries if entry.name[0] != "."]
    return tuple((str(folder), stamp(folder)) for folder in folders)


def stamp(path: Path) -> _Stamp:
    """Return a value that differs once the file has changed; None if there is no file."""
    try:
        seen = os.stat(path)  # noqa: PTH116  (of each run)
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


class _TrackedRun:
    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._status = RunStatus()
        self._queried_s = float("-inf")
        self._stamps: tuple[_Stamp, ...] = ()
        self._record: AttemptRecord | None = None
        self._metrics = MetricsTail(paths.metrics)

    def is_due(self, now_s: float) -> bool:
        """Return True if its status may have changed."""
        stamps = tuple(map(stamp, (self.paths.status, self.paths.run, self.paths.attempts)))
        has_changed, self._stamps = stamps != self._stamps, stamps
        return has_changed or self._status.state in GOING_ON or now_s - self._queried_s >= ENDED_EVERY_S

    def set_status(self, status: RunStatus, now_s: float) -> None:
        self._status, self._queried_s = status, now_s
        if status.attempt:  # none before the first attempt
            self._record = newest_record(self.paths)

    def shown(self, name: str) -> LiveRun:
        self._metrics.update()
        facts, jobs = run_facts(self.paths), job_ids(run_facts(self.paths))
        values = {  # readable at a glance: drawn values have 16 digits
            key: float(f"{value:.4g}") if isinstance(value, float) else value
            for key, value in recorded_values(self.paths).items()
        }
        extends = (" ".join(line) for line in extension_words(facts))
        return LiveRun(
            paths=self.paths,
            name=name,
            experiment=str(facts.get("name", self.paths.folder.parent.name)),
            status=self._status,
            values=", ".join(filter(None, (changed_keys.in_words(values), *extends))),
            since=self._record.start if self._record else str(facts.get("created", "")),
            job=jobs[-1] if jobs else None,
            nodes=tuple(self._record.hosts) if self._record else (),
            eta_s=run_files.remaining_s(self._status, self._metrics.training),
            losses=self._metrics.losses,
            train=self._metrics.training[-1] if self._metrics.training else {},
            evaluation=self._metrics.evaluation,
        )


class MetricsTail:
    """The newest rows of a file that grows; it is opened only if it has changed."""

    def __init__(self, path: Path) -> None:
        #: The oldest one first.
        self.training: deque[Row] = deque(maxlen=HISTORY)
        self.evaluation: Row = {}
        self.losses: tuple[float, ...] = ()
        self._path = path
        self._reader = metrics_reader.MetricsReader(path, metrics_reader.TAIL_BYTES)
        self._stamp: _Stamp = None

    def update(self) -> None:
        """Read the new rows. Raises OSError for errors of the disk."""
        seen = stamp(self._path)
        if seen == self._stamp:
            return
        before = self._reader.inode
        new = list(self._reader.new_rows())
        if seen is None or self._reader.inode != before:
            self.training.clear()  # a resume replaced the file: its rows come again
            self.evaluation = {}
        for row in new:
            if row.get("split") == "val":
                self.evaluation = row
            elif row.get("split") == "train":
                self.training.append(row)
        losses = (metrics_reader.metric_value(row, "loss") for row in self.training)
        self.losses = tuple(loss for loss in losses if loss is not None)
        self._stamp = seen


STYLES = STATE_STYLES | {"failed": "bold red", "unknown": "red"}
_BAR, _SPARKS = 8, 10
_GAP = 1
#: From the lowest to the highest; NaN and infinity are shown as a cross.
_BLOCKS, _NOT_FINITE = "▁▂▃▄▅▆▇█", "×"


@dataclass(frozen=True)
class Column:
    """A column of the table; ``width``: the maximum, without the gap to the next."""

    head: str
    width: int
    text: Callable[[LiveRun], str]
    #: Columns with a higher number are dropped first if the screen is too narrow; 0: always shown.
    rank: int = 0
    #: The width to which it may be cut; None: it is not cut.
    least: int | None = None


def _note(run: LiveRun) -> str:
    if note := run.status.reason or run.status.activity:
        return note
    name, value = run.metric or ("", None)
    metric = f"{name} {'nan' if value is None else format(value, '.4g')}" if name else ""
    slow = run.status.slow_words if run.state == "running" else ""
    return "; ".join(filter(None, (metric, slow)))


def _steps(run: LiveRun) -> str:
    total = run.status.total_steps
    return f"{run.status.step}/{'?' if total is None else total}"


def _percent(share: float | None) -> str:
    return "" if share is None or not math.isfinite(share) else f"{share:.0%}"


def rate_words(run: LiveRun) -> str:
    """Return ``1.23k samples/s``; empty if unknown."""
    return "" if run.rate is None else f"{short_number(run.rate[0])} {run.rate[1]}"


#: In the order in which they are shown.
COLUMNS = (
    Column("run", 16, lambda run: run.name, least=10),
    Column("values", 32, lambda run: run.values, rank=2, least=20),
    Column("experiment", 16, lambda run: run.experiment, rank=8, least=8),
    Column("state", 11, lambda run: run.state),
    Column("progress", _BAR, lambda run: bar(run.share, _BAR), rank=4),
    Column("step", 15, _steps, least=8),
    Column("ETA", 6, lambda run: run_files.short_duration(run.eta_s)),
    Column("trend", _SPARKS, lambda run: sparkline(run.losses, _SPARKS), rank=3),
    Column("loss", 9, lambda run: format(run.losses[-1], ".4g") if run.losses else ""),
    Column("rate", 16, rate_words, rank=5),
    Column("wait", 4, lambda run: _percent(run.data_wait), rank=6),
    Column("MFU", 4, lambda run: _percent(run.mfu), rank=7),
    Column("nodes", 14, lambda run: ",".join(run.nodes), rank=10),
    Column("job", 12, lambda run: run.job or "", rank=11),
    Column("tries", 5, lambda run: str(run.status.attempt or ""), rank=9),
    Column("error or metric", 200, _note, rank=1, least=20),
)


def columns_for(runs: Sequence[LiveRun], width: int) -> dict[Column, int]:
    """Return the columns that fit, in order, with their widths; empty columns are omitted.

    Columns of a high rank are dropped before others are cut further than to ``least``; the last column gets
    the width that the others do not need.
    """
    texts = {column: [one_line(column.text(run)) for run in runs] for column in COLUMNS}
    full = {
        column: min(column.width, max(map(len, [column.head, *cells])))
        for column, cells in texts.items()
        if any(cells)
    }
    used = {column: min(place, column.least or place) for column, place in full.items()}
    for column in sorted(used, key=lambda column: -column.rank):
        if _surplus(used, width) <= 0 or column.rank == 0:
            break
        del used[column]
    for column in used:
        used[column] += max(0, min(full[column] - used[column], -_surplus(used, width)))
    if COLUMNS[-1] in used:
        used[COLUMNS[-1]] += max(0, -_surplus(used, width))
    return used


def _surplus(used: Mapping[Column, int], width: int) -> int:
    return sum(used.values()) + _GAP * (len(used) - 1) - width


def failures(runs: Sequence[LiveRun], columns: Mapping[Column, int]) -> list[str]:
    """Return ``NAME and 3 more: REASON`` of failures that don't fit the table, the newest first."""
    width = columns.get(COLUMNS[-1], 0)
    names: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: run.since, reverse=True):
        if run.state == "failed" and len(one_line(_note(run))) > width:
            names.setdefault(run.status.reason or "", []).append(run.name)
    lines = []
    for reason, of_reason in names.items():
        more = f" and {len(of_reason) - 1} more" if len(of_reason) > 1 else ""
        lines.append(one_line(f"{of_reason[0]}{more}: {reason}"))
    return lines


def newest(runs: Sequence[LiveRun]) -> LiveRun | None:
    """Return the run that started last of those that run, else of all; None without runs."""
    return max(runs, key=lambda run: (run.state == "running", run.since), default=None)


def cells(run: LiveRun, columns: Mapping[Column, int]) -> tuple[str, ...]:
    """Return the run's line: safe for a terminal, no cell longer than its column."""
    return tuple(shortened(one_line(column.text(run)), width) for column, width in columns.items())


def bar(share: float, width: int) -> str:
    """Return a bar of ``width`` characters, filled by ``share``."""
    full = math.floor(share * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most ``width`` blocks from minimum to maximum, each a mean; a cross if not finite."""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    shown = [mean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in shown)


def mean(values: Sequence[float]) -> float:
    """Return the mean; the sum of the values may overflow."""
    return sum(value / len(values) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    span = high / 2 - low / 2  # halves: no overflow
    place = (value / 2 - low / 2) / span if span > 0 else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, int(place * len(_BLOCKS)))]


def short_number(value: float) -> str:
    """Return three digits and a unit of thousands: ``1.23k``, ``45.6M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


#: In order of interest: states that need attention come first.
_BY_STATE = ("failed", "unknown", "running", "requeued", "pending", "interrupted", "cancelled", "completed")


def _newest_loss(run: LiveRun) -> float:
    loss = run.losses[-1] if run.losses else math.inf
    return loss if math.isfinite(loss) else math.inf


#: Name of an order → its key; runs with equal keys are ordered by experiment and name.
SORTS: dict[str, Callable[[LiveRun], Any]] = {
    "name": lambda run: 0,
    "state": lambda run: _BY_STATE.index(run.state),
    "progress": lambda run: -run.share,
    "ETA": lambda run: math.inf if run.eta_s is None else run.eta_s,
    "loss": _newest_loss,
}


def selected(runs: Sequence[LiveRun], filter_text: str, sort: str) -> list[LiveRun]:
    """Return the runs that match all words, in the order ``sort``.

    A word that is a state matches that state; any other matches a part of a run's name, swept values,
    experiment, job, nodes or reason, ignoring case.
    """
    matching = [run for run in runs if all(_matches(run, word) for word in filter_text.lower().split())]
    return sorted(matching, key=lambda run: (SORTS[sort](run), run.experiment, run.name))


def _matches(run: LiveRun, word: str) -> bool:
    if word in STATES:
        return run.state == word
    status = run.status
    texts = (run.name, run.values, run.experiment, run.state, run.job or "", *run.nodes, status.reason or "")
    return any(word in text.lower() for text in texts)


def next_sort(sort: str) -> str:
    """Return the order after this one."""
    names = list(SORTS)
    return names[(names.index(sort) + 1) % len(names)]


def counts(runs: Sequence[LiveRun]) -> str:
    """Return ``3 runs: 1 failed, 2 running``."""
    by_state = {state: sum(run.state == state for run in runs) for state in _BY_STATE}
    listed = ", ".join(f"{count} {state}" for state, count in by_state.items() if count)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}{': ' if listed else ''}{listed}"
