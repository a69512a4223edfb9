"""Runs of a sweep as lines over axes: the keys that differ, and the metric at the right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.report.changed_keys import short_names, value_text
from hpc_train.report.html.collecting import Collected
from hpc_train.report.html.limits import AXES, NAME_LENGTH, WORDS
from hpc_train.report.html.line_charts import GRID
from hpc_train.report.html.scales import Scale, short
from hpc_train.report.metric_values import Metric

#: Shades of the lines, from the worst runs to the best.
SHADES = 5


@dataclass(frozen=True)
class Axis:
    """One key or the metric; ``ticks``: place in percent from the top, and label."""

    title: str
    x: float
    ticks: list[tuple[float, str]]


@dataclass(frozen=True)
class SweepLine:
    """One run: shade 0 (worst) to ``SHADES`` - 1 (best)."""

    run: int
    shade: int
    path: str
    text: str


@dataclass(frozen=True)
class ParallelCoordinates:
    """The chart; the best run is drawn last."""

    axes: list[Axis]
    lines: list[SweepLine]
    hidden_axes: int
    #: Runs without a value of the metric, which have no line.
    hidden_runs: int


def parallel_coordinates(collected: Collected) -> ParallelCoordinates | None:
    """Return the chart; None unless several runs with a value of the metric differ in a key."""
    metric, keys = collected.metric, collected.keys
    if metric is None:
        return None
    measured = [(place, run.best(metric)) for place, run in enumerate(collected.runs)]
    bests = [(place, point.value) for place, point in measured if point is not None]
    if len(bests) < 2 or not keys:
        return None
    shown, names = keys[: AXES - 1], short_names(keys)
    gap = 100 / len(shown)
    columns = [_column([collected.runs[place].values.get(key) for place, _ in bests]) for key in shown]
    axes = [
        Axis(names[key], round(number * gap, 2), ticks)
        for number, (key, (_, ticks)) in enumerate(zip(shown, columns, strict=True))
    ]
    places, ticks = _metric_column([value for _, value in bests], metric)
    axes.append(Axis(f"best {metric}", 100.0, ticks))
    lines = []
    for rank, (place, value) in enumerate(bests):
        downs = [*(column[rank] for column, _ in columns), places[rank]]
        path = "M" + "L".join(
            f"{round(axis.x * GRID / 100)} {round(down * GRID / 100)}"
            for axis, down in zip(axes, downs, strict=True)
        )
        run = collected.runs[place]
        settings = ", ".join(f"{names[key]} {value_text(run.values.get(key))}" for key in shown)
        shade = SHADES - 1 - SHADES * rank // len(bests)
        lines.append(SweepLine(place, shade, path, f"{run.name}: {metric} {short(value)}, {settings}"))
    return ParallelCoordinates(axes, lines[::-1], len(keys) - len(shown), len(measured) - len(bests))


def _metric_column(values: Sequence[float], metric: Metric) -> tuple[list[float], list[tuple[float, str]]]:
    """Return places in percent from the top, and ticks; the better end is at the top."""
    scale = Scale.over(values)
    places = [_down(scale.place(value)) for value in values]
    ticks = [(_down(scale.place(tick)), short(tick)) for tick in scale.ticks(5)]
    if metric.goal == "min":
        return [100 - place for place in places], [(100 - place, label) for place, label in ticks]
    return places, ticks


def _column(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    numbers = [float(value) for value in values if _is_number(value)]
    if len(numbers) == len(values):
        distinct = sorted(set(numbers))
        # The values that a grid takes are labelled themselves.
        scale = Scale.over(distinct, is_exact=len(distinct) > 1)
        ticks = distinct if len(distinct) <= WORDS else scale.ticks(5)
        return (
            [_down(scale.place(value)) for value in numbers],
            _spread([(_down(scale.place(tick)), short(tick)) for tick in ticks]),
        )
    words = [json.dumps(value, sort_keys=True, default=str) for value in values]
    order = {word: number for number, word in enumerate(sorted(set(words)))}
    last = max(len(order) - 1, 1)
    labels = {word: value_text(value)[:NAME_LENGTH] for word, value in zip(words, values, strict=True)}
    every = max(1, len(order) // WORDS)
    ticks_of_words = [
        (_down(number / last), labels[word]) for word, number in order.items() if number % every == 0
    ]
    return [_down(order[word] / last) for word in words], ticks_of_words


def _spread(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks without those whose labels would overlap the one before."""
    found: list[tuple[float, str]] = []
    for place, label in ticks:
        if not found or abs(found[-1][0] - place) >= 6:
            found.append((place, label))
    return found


def _is_number(value: object) -> bool:
    return (type(value) is int and abs(value) < 2**53) or (type(value) is float and abs(value) < 1e300)


def _down(share: float) -> float:
    return round(100 - 100 * share, 2)
