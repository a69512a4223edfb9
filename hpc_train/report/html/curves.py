"""Metrics over steps, with no more points than a page shows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

from hpc_train.report.html.limits import METRICS, NAME_LENGTH
from hpc_train.report.metric_values import Metric
from hpc_train.report.metrics_reader import Row, number
from hpc_train.run.metric_rows import POSITION

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
        kept = {0, count - 1}
        for part in range(parts):
            span = range(1 + part * (count - 2) // parts, 1 + (part + 1) * (count - 2) // parts)
            if span:
                kept |= {min(span, key=self.values.__getitem__), max(span, key=self.values.__getitem__)}
        places = sorted(kept)
        return Curve(
            array("q", [self.steps[place] for place in places]),
            array("d", [self.values[place] for place in places]),
        )


def curves_of(rows: Sequence[Row], max_points: int, *, left_out: tuple[str, ...] = ()) -> dict[Metric, Curve]:
    """Return the curve of each metric in the rows, at most ``max_points`` each.

    ``left_out``: beginnings of the names of metrics that are not needed.
    """
    # By split, then by name: hashing a ``Metric`` per value would take most of the time.
    found: dict[str, dict[str, Curve]] = {}
    for row in rows:
        step, split = row.get("step"), row.get("split")
        if type(step) is int and 0 <= step < MAX_STEP and isinstance(split, str):
            if left_out and split != "train":
                row = {name: value for name, value in row.items() if not name.startswith(left_out)}  # noqa: PLW2901
            _add(found.setdefault(split, {}), row, step)
    curves = [
        (_metric(split, name), curve)
        for split, by_name in found.items()
        for name, curve in by_name.items()
        if max(len(split), len(name)) <= NAME_LENGTH
    ]
    return {metric: curve.thinned(max_points) for metric, curve in curves[:METRICS]}


@lru_cache(METRICS)
def _metric(split: str, name: str) -> Metric:
    """Return the same object for thousands of runs: as a key it is compared by identity."""
    return Metric(split, name)


def non_finite_ends(rows: Sequence[Row], curves: Mapping[Metric, Curve]) -> dict[Metric, int]:
    """Return the last step of each metric that was NaN or infinite after all of its finite values.

    Rows have null for both.
    """
    found: dict[Metric, int] = {}
    for row in rows:
        step, split = row.get("step"), row.get("split")
        if type(step) is not int or not 0 <= step < MAX_STEP or not isinstance(split, str):
            continue
        for name, value in row.items():
            if value is None or (type(value) is float and not isfinite(value)):
                metric = Metric(split, name)
                found[metric] = max(step, found.get(metric, 0))
    return {metric: step for metric, step in found.items() if _is_after(step, curves.get(metric))}


def _is_after(step: int, curve: Curve | None) -> bool:
    return curve is None or step > curve.steps[-1]


def _add(found: dict[str, Curve], row: Row, step: int) -> None:
    wait = _data_wait(row)
    for name, value in (row if wait is None else {**row, DATA_WAIT.name: wait}).items():
        if type(value) not in _NUMBERS or name in POSITION:
            continue
        finite = value if type(value) is float else number(value)
        if finite is None or not isfinite(finite):
            continue
        curve = found.get(name)
        if curve is None:
            if len(found) >= METRICS:
                continue
            curve = found[name] = Curve(array("q"), array("d"))
        steps = curve.steps
        if not steps or step > steps[-1]:
            steps.append(step)
            curve.values.append(finite)


def _data_wait(row: Row) -> float | None:
    if row["split"] != DATA_WAIT.split:
        return None
    step_s, wait_s = number(row.get("step_s")), number(row.get("data_wait_s"))
    return 100 * wait_s / step_s if step_s and wait_s is not None and step_s > 0 else None
