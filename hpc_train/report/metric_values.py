"""A metric's values over a run: comparison of two values, the last and the best one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpc_train.report.metrics_reader import Row, metric_value
from hpc_train.run.best import PREFERRED, goal_of
from hpc_train.run.metric_rows import POSITION
from hpc_train.run.run_status import RunStatus

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

    value: float
    step: int

    def to_json(self) -> dict[str, Any]:
        """Return ``last`` or ``best`` of a run in ``compare --json``; a value that is not finite is None."""
        return {"value": self.value if math.isfinite(self.value) else None, "step": self.step}


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
        value, step = metric_value(row, metric.name), row.get("step")
        if row.get("split") != metric.split or value is None or type(step) is not int:
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
