"""``RunsReader``: the state of runs for the screen, read repeatedly at low cost.

A file is opened only if its size, inode or modification time has changed, and reading of metrics continues at
the end of the last reading.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.errors import UsageError
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths, runs_root
from hpc_train.report import metrics_reader
from hpc_train.report.changed_keys import in_words
from hpc_train.report.metrics_reader import Row, number
from hpc_train.report.run_files import remaining_s
from hpc_train.run.attempts import AttemptRecord, job_ids
from hpc_train.run.find import find_and_skip, is_run, run_names
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import GOING_ON, RunStatus, extension_words, recorded_values, run_facts

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
            values=", ".join(filter(None, (in_words(values), *extends))),
            since=self._record.start if self._record else str(facts.get("created", "")),
            job=jobs[-1] if jobs else None,
            nodes=tuple(self._record.hosts) if self._record else (),
            eta_s=remaining_s(self._status, self._metrics.training),
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
