"""Reads runs for the page: each file once, and only the metric rows that are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys
from hpc_train.report.html.curves import MAX_STEP, Curve, curves_of, non_finite_ends
from hpc_train.report.html.limits import (
    ALL_ROWS,
    CURVE_POINTS,
    DETAILED,
    DETAILED_ROWS,
    MIN_EVALUATIONS,
    MIN_ROWS,
)
from hpc_train.report.metric_values import Metric, Point, find_metric, is_better, sort_key
from hpc_train.report.metrics_reader import sampled_rows
from hpc_train.report.run_files import RunFiles
from hpc_train.report.run_times import attempt_span, elapsed_s, first_step_words
from hpc_train.report.step_layout import ranks_of
from hpc_train.report.time_use import attempt_cause, time_use
from hpc_train.run.find import run_names
from hpc_train.run.run_status import RunStatus

#: Prefixes of metrics of single classes.
CLASSES = ("iou_", "ema_iou_")


@dataclass(frozen=True)
class Attempt:
    """From one start of a run's ranks to their end; None: unknown."""

    number: int
    #: UTC, as recorded: ISO 8601.
    start: str
    cause: str
    reason: str | None
    nodes: list[str]
    ranks: int | None
    #: Seconds since 1970.
    span: tuple[float, float] | None
    #: Parts of the time of its first step; empty if unknown.
    first_step_words: str
    #: The last step of its rows; None if it has none.
    last_step: int | None


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
    #: Seconds by part, see ``time_use.PARTS``.
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
            if best is None or is_better(point, best, metric):
                best = point
        return best


@dataclass(frozen=True)
class Collected:
    """The runs, the best by ``metric`` first; runs without it last."""

    runs: list[RunData]
    #: None: no run has measured any.
    metric: Metric | None

    @cached_property
    def keys(self) -> list[str]:
        """The keys in which the runs differ, the same for all runs that can be read."""
        return list(dict.fromkeys(key for run in self.runs for key in run.values))

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics that any of the runs has measured, in the order of the rows."""
        return list(dict.fromkeys(metric for run in self.runs for metric in run.curves))


def collect(runs: Sequence[RunPaths], wanted: str | None = None) -> Collected:
    """Read the runs. ``wanted``: the metric by which they are compared, else the first of ``PREFERRED``.

    If no run has ``wanted``, ``metric`` is None.
    """
    names, values = run_names(runs), changed_keys(runs)
    has_details = len(runs) > DETAILED
    share = ALL_ROWS // max(len(runs), 1) // 2
    # Metrics of classes are shown for the best runs only.
    left_out = CLASSES if has_details and not (wanted or "").rpartition("/")[2].startswith(CLASSES) else ()
    found = [
        _read(paths, status, names[paths], values[paths], share, left_out)
        for paths, status in zip(runs, statuses(runs), strict=True)
    ]
    metric = find_metric((metric for run in found for metric in run.curves), wanted)
    if metric is not None:
        found.sort(key=lambda run: sort_key(run.best(metric), metric))
    if has_details:
        best = [_read(run.paths, run.status, run.name, run.values, DETAILED_ROWS) for run in found[:DETAILED]]
        if metric is not None:
            best.sort(key=lambda run: sort_key(run.best(metric), metric))
        found[:DETAILED] = best
    return Collected(found, metric)


def _read(
    paths: RunPaths,
    status: RunStatus,
    name: str,
    values: dict[str, Any],
    max_rows: int,
    left_out: tuple[str, ...] = (),
) -> RunData:
    run = RunFiles.read(paths)
    rows, is_sampled = sampled_rows(paths.metrics, max(MIN_ROWS, max_rows), max(MIN_EVALUATIONS, max_rows))
    curves = curves_of(rows, CURVE_POINTS, left_out=left_out)
    return RunData(
        paths=paths,
        name=name,
        experiment=paths.siblings.folder.name,
        status=status,
        facts=run.facts,
        values=values,
        attempts=_attempts(run, status, _last_steps(rows)),
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


def _last_steps(rows: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        attempt, step = row.get("attempt"), row.get("step")
        if type(attempt) is int and type(step) is int and 0 <= step < MAX_STEP:
            found[attempt] = step
    return found


def _attempts(run: RunFiles, status: RunStatus, last_steps: Mapping[int, int]) -> list[Attempt]:
    found = []
    for attempt, record in run.recorded:
        is_running = run.is_running(record, status)
        found.append(
            Attempt(
                number=attempt.number,
                start=record.start,
                cause=attempt_cause(record, is_running=is_running),
                reason=record.reason,
                nodes=record.hosts,
                ranks=ranks_of(run.facts, record),
                span=attempt_span(attempt, record, is_running=is_running),
                first_step_words=first_step_words(record.first_step),
                last_step=last_steps.get(attempt.number, record.saved_step),
            )
        )
    return found
