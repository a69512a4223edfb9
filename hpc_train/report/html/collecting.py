"""Reads runs for the page: each file once, only rows of metrics and evaluations that are shown.

Another user may have written the files, so reading is bounded.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest
from operator import itemgetter, lt
from pathlib import Path
from typing import Any

from hpc_train.errors import shortened
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.report import metrics_reader
from hpc_train.report.changed_keys import changed_keys, short_names, value_text
from hpc_train.report.html import limits
from hpc_train.report.metrics_reader import Metric, Point, Row, number
from hpc_train.report.run_files import RunFiles, attempt_span, elapsed_s, ranks_of
from hpc_train.report.usage import attempt_cause, time_use
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.find import run_names
from hpc_train.run.metric_rows import POSITION
from hpc_train.run.run_status import RunStatus, recorded_values

#: Prefixes of metrics of single classes.
CLASSES = ("iou_", "ema_iou_")
#: The share of a step in which it waits for data, in percent: made of two columns of a training row.
DATA_WAIT = Metric("train", "data_wait_percent")
#: More than any step; arithmetic on larger numbers is not exact, or overflows.
MAX_STEP = 2**53
#: ``bool`` is excluded.
_NUMBERS = {int, float}


@dataclass(frozen=True, slots=True)
class Curve:
    """Finite values by step, in the order of the steps."""

    steps: array[int]
    values: array[float]

    def __len__(self) -> int:
        return len(self.steps)

    def thinned(self, max_points: int) -> Curve:
        """Return at most ``max_points`` (or 4) points: first and last, and lowest and highest of each part.

        So no peak is lost, unlike with a mean or every k-th point.
        """
        count = len(self)
        if count <= max(max_points, 4):
            return self
        parts = max(1, (max_points - 2) // 2)
        places = {0, count - 1}
        for part in range(parts):
            span = range(1 + part * (count - 2) // parts, 1 + (part + 1) * (count - 2) // parts)
            if span:
                places |= {min(span, key=self.values.__getitem__), max(span, key=self.values.__getitem__)}
        return Curve(
            array("q", [self.steps[place] for place in sorted(places)]),
            array("d", [self.values[place] for place in sorted(places)]),
        )


@dataclass(frozen=True)
class Attempt:
    """From one start of a run's ranks to their end; None: unknown."""

    record: AttemptRecord
    cause: str
    ranks: int | None
    #: Seconds since 1970.
    span: tuple[float, float] | None


@dataclass(frozen=True)
class RunData:
    """One run on the page."""

    paths: RunPaths
    name: str
    experiment: str
    status: RunStatus
    facts: Mapping[str, Any]
    #: The keys in which the runs differ.
    values: dict[str, Any]
    attempts: list[Attempt]
    curves: dict[Metric, Curve]
    #: Metrics whose newest value is NaN or infinite, and its step.
    non_finite_ends: dict[Metric, int]
    elapsed_s: float | None
    #: Seconds by part, see ``usage.PARTS``.
    time_use: dict[str, float]
    #: Not all rows of its metrics were read.
    is_sampled: bool

    @property
    def goodput(self) -> float | None:
        """The share of its time spent in useful steps."""
        total = sum(self.time_use.values())
        return self.time_use["training"] / total if total and self.time_use["training"] else None

    def last(self, metric: Metric) -> Point | None:
        """Return the metric's newest value, which may be NaN."""
        if metric in self.non_finite_ends:
            return Point(math.nan, self.non_finite_ends[metric])
        curve = self.curves.get(metric)
        return Point(curve.values[-1], curve.steps[-1]) if curve else None

    def best(self, metric: Metric) -> Point | None:
        """Return the metric's best value; the curve contains it, since thinning keeps extremes."""
        best: Point | None = None
        curve = self.curves.get(metric)
        for step, value in zip(curve.steps, curve.values, strict=True) if curve else ():
            point = Point(value, step)
            if best is None or metrics_reader.is_better(point, best, metric):
                best = point
        return best


@dataclass(frozen=True)
class Ranking:
    """Runs that can be compared, the best by ``metric`` first; runs without it last."""

    #: None: none of the runs has measured any.
    metric: Metric | None
    runs: list[RunData]
    #: Empty if there is one ranking.
    task: str


@dataclass(frozen=True)
class Collected:
    """The runs in rankings: one, or one per task, since values of different tasks can't be compared."""

    rankings: list[Ranking]

    @cached_property
    def runs(self) -> list[RunData]:
        """The best run of each ranking, then the second ones, and so on."""
        rounds = zip_longest(*(ranking.runs for ranking in self.rankings))
        return [run for same_rank in rounds for run in same_rank if run is not None]

    @cached_property
    def places(self) -> dict[RunPaths, int]:
        """The place of each of the runs."""
        return {run.paths: place for place, run in enumerate(self.runs)}

    @property
    def metric(self) -> Metric | None:
        """The metric of the first ranking that has one."""
        return next((ranking.metric for ranking in self.rankings if ranking.metric), None)

    @cached_property
    def keys(self) -> list[str]:
        """The keys in which the runs differ, the same for all runs that can be read."""
        return list(dict.fromkeys(key for run in self.runs for key in run.values))

    @cached_property
    def swept(self) -> dict[str, list[str]]:
        """The keys of each experiment that its sweep varied, or in which its runs differ."""
        by_experiment: dict[str, list[RunData]] = {}
        for run in self.runs:
            by_experiment.setdefault(run.experiment, []).append(run)
        return {experiment: self._swept(runs) for experiment, runs in by_experiment.items()}

    def _swept(self, runs: Sequence[RunData]) -> list[str]:
        """Return the keys in the order of the sweep, then others, the seed last."""
        recorded = dict.fromkeys(key for run in runs for key in recorded_values(run.paths))
        differing = [
            key
            for key in self.keys
            if len({value_text(run.values[key]) for run in runs if key in run.values}) > 1
        ]
        differing.sort(key="seed".__eq__)
        return list(dict.fromkeys([key for key in recorded if key in self.keys] + differing))

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each of the keys on the page: its shortest suffix that identifies it."""
        return short_names(self.keys)

    @cached_property
    def labels(self) -> list[str]:
        """The name of each of the runs in legends: ``lr=0.01 seed=1``, after its experiment if there are
        several, and before its id if other runs have the same values.
        """
        labels = [self._label(run) for run in self.runs]
        counts = Counter(labels)
        return [
            label if counts[label] == 1 else f"{label} {run.paths.folder.name}"
            for label, run in zip(labels, self.runs, strict=True)
        ]

    def _label(self, run: RunData) -> str:
        experiment = [shortened(run.experiment, limits.LABEL_PART)] if len(self.swept) > 1 else []
        values = [
            f"{self.names[key]}={shortened(value_text(run.values[key]), limits.LABEL_PART)}"
            for key in self.swept[run.experiment]
            if key in run.values
        ]
        return " ".join(experiment + values) or run.name

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics that any of the runs has measured, in the order of the rows."""
        return list(dict.fromkeys(metric for run in self.runs for metric in run.curves))


def collect(runs: Sequence[RunPaths], wanted: str | None = None) -> Collected:
    """Read the runs. ``wanted``: the metric by which all are compared, else by task the one that decides
    in ``checkpoint.best``, or the first of ``PREFERRED`` that the runs have.

    If no run has ``wanted``, ``metric`` is None.
    """
    names, values = _names(runs), changed_keys(runs)
    has_details = len(runs) > limits.DETAILED
    share = limits.ALL_ROWS // max(len(runs), 1) // 2
    # Metrics of classes are shown for the best runs only.
    omitted = CLASSES if has_details and not (wanted or "").rpartition("/")[2].startswith(CLASSES) else ()
    read = [
        _read(paths, status, names[paths], values[paths], share, omitted)
        for paths, status in zip(runs, statuses(runs), strict=True)
    ]
    collected = _ranked(read, wanted)
    if has_details:
        best = [
            _read(run.paths, run.status, run.name, run.values, limits.DETAILED_ROWS)
            for run in collected.runs[: limits.DETAILED]
        ]
        collected = _ranked([*best, *collected.runs[limits.DETAILED :]], wanted)
    return collected


def _names(runs: Sequence[RunPaths]) -> dict[RunPaths, str]:
    """Return ``run_names``; of runs in another folder, whose name is their path, the shortest unique end."""
    named = {paths: [name] for paths, name in run_names(runs).items()}
    for paths, names in named.items():
        if Path(names[0]).is_absolute():
            names[:0] = ["/".join(paths.folder.parts[-count:]) for count in (1, 2)]
    counts = Counter(name for names in named.values() for name in names)
    return {
        paths: next((name for name in names if counts[name] == 1), names[-1])
        for paths, names in named.items()
    }


def _ranked(runs: Sequence[RunData], wanted: str | None) -> Collected:
    by_task: dict[str, list[RunData]] = {}
    for run in runs:
        by_task.setdefault("" if wanted else str(run.values.get("task", "")), []).append(run)
    rankings = []
    for task, comparable in by_task.items():
        decisive = metrics_reader.decisive_metric(run.status for run in comparable)
        metric = metrics_reader.find_metric(
            (metric for run in comparable for metric in run.curves), wanted, decisive
        )
        if metric is not None:
            comparable.sort(key=lambda run, metric=metric: metrics_reader.sort_key(run.best(metric), metric))  # type: ignore[misc]
        rankings.append(Ranking(metric, comparable, task))
    return Collected(rankings)


def _read(
    paths: RunPaths,
    status: RunStatus,
    name: str,
    values: dict[str, Any],
    max_rows: int,
    omitted: tuple[str, ...] = (),
) -> RunData:
    run = RunFiles.read(paths)
    rows, is_sampled = metrics_reader.sampled_rows(
        paths.metrics, max(limits.MIN_ROWS, max_rows), max(limits.MIN_EVALUATIONS, max_rows)
    )
    curves = curves_of(rows, limits.CURVE_POINTS, omitted=omitted)
    return RunData(
        paths=paths,
        name=name,
        experiment=paths.siblings.folder.name,
        status=status,
        facts=run.facts,
        values=values,
        attempts=list(_attempts(run, status)),
        curves=curves,
        non_finite_ends=non_finite_ends(rows, curves),
        elapsed_s=elapsed_s(run, status),
        time_use=_time_use(run, status, rows),
        is_sampled=is_sampled,
    )


def _time_use(run: RunFiles, status: RunStatus, rows: list[dict[str, Any]]) -> dict[str, float]:
    try:
        return time_use(run, status, rows)
    except (OSError, OverflowError):  # files that can't be read, or have absurd numbers: the rest is shown
        return {}


def _attempts(run: RunFiles, status: RunStatus) -> Iterator[Attempt]:
    for attempt, record in run.recorded:
        is_running = run.is_running(record, status)
        yield Attempt(
            record,
            attempt_cause(record, is_running=is_running),
            ranks_of(run.facts, record),
            attempt_span(attempt, record, is_running=is_running),
        )


def curves_of(rows: Sequence[Row], max_points: int, *, omitted: tuple[str, ...] = ()) -> dict[Metric, Curve]:
    """Return at most ``max_points`` of each metric, except names that begin with one of ``omitted``."""
    # By split, then by name: hashing a ``Metric`` per value would take most of the time.
    by_split: dict[str, dict[str, Curve]] = {}
    rows_by_split: dict[str, list[Row]] = {}
    for row in filter(_has_place, rows):
        rows_by_split.setdefault(row["split"], []).append(row)
    for split, of_split in rows_by_split.items():
        for _, alike in groupby(of_split, tuple):
            _add(by_split.setdefault(split, {}), list(alike), () if split == "train" else omitted)
    curves = [
        (_metric(split, name), curve)
        for split, by_name in by_split.items()
        for name, curve in by_name.items()
        if max(len(split), len(name)) <= limits.NAME_LENGTH
    ]
    return {metric: curve.thinned(max_points) for metric, curve in curves[: limits.METRICS]}


@lru_cache(limits.METRICS)
def _metric(split: str, name: str) -> Metric:
    """Return the same object for thousands of runs: as a key it is compared by identity."""
    return Metric(split, name)


def non_finite_ends(rows: Sequence[Row], curves: Mapping[Metric, Curve]) -> dict[Metric, int]:
    """Return each metric's last step with NaN or infinity (null in rows) after all its finite values."""
    ends: dict[Metric, int] = {}
    newest: dict[str, set[str]] = {}  # by split, the names whose newest value was seen
    for row in sorted(filter(_has_place, rows), key=itemgetter("step"), reverse=True):
        step, split = row["step"], row["split"]
        seen = newest.setdefault(split, set())
        for name in row.keys() - seen:
            value = row[name]
            if value is None or (type(value) is float and not math.isfinite(value)):
                ends[Metric(split, name)] = step
            if value is None or (type(value) in _NUMBERS and number(value) is not None):
                seen.add(name)
    return {
        metric: step
        for metric, step in ends.items()
        if metric not in curves or step > curves[metric].steps[-1]
    }


def _has_place(row: Row) -> bool:
    step = row.get("step")
    return type(step) is int and 0 <= step < MAX_STEP and isinstance(row.get("split"), str)


def _add(curves: dict[str, Curve], rows: Sequence[Row], omitted: tuple[str, ...]) -> None:
    """Append the values of rows of one split that have the same names."""
    names = [name for name in rows[0] if name not in POSITION and not (omitted and name.startswith(omitted))]
    columns = {name: [row[name] for row in rows] for name in names}
    waits = list(map(_data_wait, rows))
    if waits.count(None) < len(waits):
        own = columns.get(DATA_WAIT.name, waits)
        columns[DATA_WAIT.name] = [
            old if wait is None else wait for wait, old in zip(waits, own, strict=True)
        ]
    steps = array("q", [row["step"] for row in rows])
    is_ascending = all(map(lt, steps, steps[1:]))
    for name, values in columns.items():
        all_finite = set(map(type, values)) == {float} and all(map(math.isfinite, values))
        curve = curves.get(name)
        if curve is None:
            if len(curves) >= limits.METRICS or not (all_finite or any(_finite(steps, values))):
                continue
            curve = curves[name] = Curve(array("q"), array("d"))
        if all_finite and is_ascending and (not curve.steps or steps[0] > curve.steps[-1]):
            curve.steps.extend(steps)
            curve.values.extend(values)
            continue
        for step, value in _finite(steps, values):
            if not curve.steps or step > curve.steps[-1]:
                curve.steps.append(step)
                curve.values.append(value)


def _finite(steps: Iterable[int], values: Iterable[Any]) -> Iterator[tuple[int, float]]:
    for step, value in zip(steps, values, strict=True):
        finite = number(value) if type(value) in _NUMBERS else None
        if finite is not None and math.isfinite(finite):
            yield step, finite


def _data_wait(row: Row) -> float | None:
    if row["split"] != DATA_WAIT.split:
        return None
    step_s, wait_s = number(row.get("step_s")), number(row.get("data_wait_s"))
    return 100 * wait_s / step_s if step_s and wait_s is not None and step_s > 0 else None
