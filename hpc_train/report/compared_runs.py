"""Runs as ``compare`` shows them: individually, or averaged over runs that differ only in some keys."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.report.metric_values import Metric, Point


@dataclass(frozen=True)
class Compared:
    """One run: its values of the keys that differ, and its metrics."""

    paths: RunPaths
    name: str
    state: str
    values: dict[str, Any]
    last: Point | None
    best: Point | None
    duration_s: float | None


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1 in the denominator) of the finite values of several runs."""

    mean: float
    #: None for a single value.
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread; None if there is no finite value."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite:
            return None
        std = statistics.stdev(finite) if len(finite) > 1 else None
        return cls(statistics.fmean(finite), std, len(finite))

    def __str__(self) -> str:
        return f"{self.mean:.6g}" if self.std is None else f"{self.mean:.6g} ± {self.std:.2g}"

    def to_json(self) -> dict[str, Any]:
        """Return ``last`` or ``best`` of averaged runs in ``compare --json``."""
        return {"mean": self.mean, "std": self.std, "count": self.count}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the keys over which their metrics are averaged."""

    values: dict[str, Any]
    runs: list[Compared]
    last: Spread | None
    best: Spread | None
    duration: Spread | None


def grouped(runs: Iterable[Compared], over: Collection[str], metric: Metric) -> list[Group]:
    """Return the groups, the one with the best mean first."""
    members: dict[str, tuple[dict[str, Any], list[Compared]]] = {}
    for run in runs:
        values = {key: value for key, value in run.values.items() if key not in over}
        members.setdefault(json.dumps(values, sort_keys=True, default=str), (values, []))[1].append(run)
    groups = [_group(values, each) for values, each in members.values()]
    sign = 1 if metric.goal == "min" else -1
    return sorted(groups, key=lambda group: math.inf if group.best is None else sign * group.best.mean)


def _group(values: dict[str, Any], runs: Sequence[Compared]) -> Group:
    last, best = (
        Spread.of(point.value if point else None for point in points)
        for points in zip(*((run.last, run.best) for run in runs), strict=True)
    )
    return Group(values, list(runs), last, best, Spread.of(run.duration_s for run in runs))
