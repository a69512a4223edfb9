"""A metric's values over a run: comparison of two values, the last and the best one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_train.report.metrics_reader import Row, metric_value
from hpc_train.run.best import PREFERRED, goal_of
from hpc_train.run.metric_rows import POSITION

SPLITS = ("val", "train")


@dataclass(frozen=True)
class Metric:
    """A column of ``metrics.jsonl``: ``val/accuracy``."""

    split: str
    name: str

    @cached_property
    def goal(self) -> str:
        """``min`` or ``max``, by the metric's name."""
        return goal_of(self.name)

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


def metrics_in(rows: Iterable[Row]) -> set[Metric]:
    """Return the metrics that the rows have."""
    return {Metric(str(row.get("split")), name) for row in rows for name in row if name not in POSITION}


def find_metric(metrics: Iterable[Metric], wanted: str | None) -> Metric | None:
    """Return the metric of this name, ``loss`` or ``train/loss``: in validation rows, else in training rows.

    Without ``wanted``, the first of ``PREFERRED``. None if ``found`` does not contain it.
    """
    available = set(metrics)
    return next((metric for metric in candidate_metrics(wanted) if metric in available), None)


def candidate_metrics(wanted: str | None) -> list[Metric]:
    """Return the metrics that ``find_metric`` tries, in its order."""
    names = PREFERRED if wanted is None else (wanted,)
    metrics = [
        Metric(*name.split("/", 1)) if "/" in name else Metric(split, name)
        for split in SPLITS
        for name in names
    ]
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
