"""Curves of all runs, one chart per metric, as paths on a grid of 1000 × 1000 that the page stretches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_train.report.html.collecting import CLASSES, Collected, RunData
from hpc_train.report.html.curves import DATA_WAIT, Curve
from hpc_train.report.html.limits import ALL_POINTS, CHARTS, CURVE_POINTS, HIGHLIGHTED, MARKS
from hpc_train.report.html.scales import Scale, short
from hpc_train.report.metric_values import Metric

if TYPE_CHECKING:
    from markupsafe import Markup

GRID = 1000
#: Attempts with these causes have no mark.
_UNMARKED = {"completed", "running", "unknown"}
#: Shown as throughput and data wait.
_SHOWN_ELSEWHERE = {Metric("train", "step_s"), Metric("train", "data_wait_s")}
#: Training metrics in the order of their charts; others follow.
_TRAINING = (
    "loss", "accuracy", "lr", "samples_per_s", "tokens_per_s", DATA_WAIT.name, "peak_memory_gib", "mfu",
    "grad_norm", "tflops_per_s",
)  # fmt: skip
_TITLES = {
    "train/lr": "Learning rate",
    "train/samples_per_s": "Throughput (samples/s)",
    "train/tokens_per_s": "Throughput (tokens/s)",
    f"train/{DATA_WAIT.name}": "Data wait (% of the step)",
    "train/peak_memory_gib": "Peak memory (GiB)",
    "train/mfu": "Model FLOP utilization",
    "train/grad_norm": "Gradient norm",
    "train/tflops_per_s": "TFLOP/s",
}


@dataclass(frozen=True)
class Line:
    """One run's curve; ``color`` is the number of its colour, None in the background."""

    run: int
    color: int | None
    path: str
    curve: Curve
    #: The only point of the curve, in percent from the left and the top.
    dot: tuple[float, float] | None


@dataclass(frozen=True)
class Mark:
    """An attempt that ended early, in percent from the left."""

    x: float
    color: int | None
    text: str


@dataclass(frozen=True)
class LineChart:
    """One metric of all runs."""

    title: str
    metric: Metric
    lines: list[Line]
    x: Scale
    y: Scale
    marks: list[Mark] = field(default_factory=list)
    #: Description of the chart for screen readers.
    summary: str = ""

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Position in percent from the left, and label."""
        return [(round(100 * self.x.place(value), 2), short(value)) for value in self.x.ticks(4)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Position in percent from the top, and label."""
        return [(round(100 - 100 * self.y.place(value), 2), short(value)) for value in self.y.ticks(4)]

    @property
    def background(self) -> Markup:
        """The curves without a colour as SVG: a loop of the template takes seconds for thousands of runs."""
        from markupsafe import Markup  # with the template engine

        paths = ((line.run, line.path) for line in self.lines if line.color is None)
        return Markup(
            "".join(f'<path class="curve rest" data-run="{run:d}" d="{path}"/>\n' for run, path in paths)
        )

    @property
    def highlighted(self) -> list[Line]:
        """The curves with a colour, drawn on top of the others."""
        return [line for line in self.lines if line.color is not None]

    def data(self) -> dict[str, Any]:
        """Return the data that the page's script shows below the pointer."""
        return {
            "x": [self.x.low, self.x.high],
            "y": [self.y.low, self.y.high, int(self.y.is_log)],
            "lines": [
                [line.run, list(line.curve.steps), [float(f"{value:.6g}") for value in line.curve.values]]
                for line in self.lines
            ],
        }


def line_charts(collected: Collected) -> list[LineChart]:
    """Return the charts: first the metric by which runs are compared, then other metrics of evaluations."""
    metrics = list(_ordered(collected))[:CHARTS]
    num_curves = sum(metric in run.curves for run in collected.runs for metric in metrics)
    max_points = min(CURVE_POINTS, max(4, ALL_POINTS // max(num_curves, 1)))
    steps = [curve.steps[-1] for run in collected.runs for curve in run.curves.values() if curve]
    x = Scale(0.0, float(max(steps, default=1) or 1))
    marks = list({(mark.x, mark.color): mark for mark in _marks(collected.runs, x)}.values())[:MARKS]
    return [_chart(metric, collected, x, max_points, marks) for metric in metrics]


def _ordered(collected: Collected) -> Iterator[Metric]:
    """Yield the metrics that have a chart; classes' IoU has a separate section."""
    found = [
        each
        for each in collected.metrics
        if not each.name.startswith(CLASSES) and each not in _SHOWN_ELSEWHERE
    ]
    if collected.metric is not None:
        yield collected.metric
    rest = [each for each in found if each != collected.metric]
    yield from (each for each in rest if each.split != "train")
    training = [each for each in rest if each.split == "train"]
    known = {name: place for place, name in enumerate(_TRAINING)}
    yield from sorted(training, key=lambda each: known.get(each.name, len(known)))


def _chart(metric: Metric, collected: Collected, x: Scale, max_points: int, marks: list[Mark]) -> LineChart:
    found = [(place, curve) for place, run in enumerate(collected.runs) if (curve := run.curves.get(metric))]
    values = [value for _, curve in found for value in (min(curve.values), max(curve.values))]
    y = Scale.over(values)
    # The best run is drawn last, on top of the others.
    lines = [_line(place, curve, x, y, max_points) for place, curve in reversed(found)]
    title = _TITLES.get(str(metric), str(metric))
    summary = _summary(metric, title, [collected.runs[place] for place, _ in found])
    return LineChart(title, metric, lines, x, y, marks, summary)


def _line(run: int, curve: Curve, x: Scale, y: Scale, max_points: int) -> Line:
    is_highlighted = run < HIGHLIGHTED
    shown = curve if is_highlighted else curve.thinned(max_points)
    across, down = x.places(shown.steps), y.places(shown.values)
    places = [(round(GRID * right), round(GRID - GRID * up)) for right, up in zip(across, down, strict=True)]
    path = "M" + "L".join(f"{right} {below}" for right, below in places)
    dot = (places[0][0] * 100 / GRID, places[0][1] * 100 / GRID) if len(places) == 1 else None
    return Line(run, run if is_highlighted else None, path, shown, dot)


def _summary(metric: Metric, title: str, runs: Sequence[RunData]) -> str:
    lasts = [point.value for run in runs if (point := run.last(metric))]
    finite = [value for value in lasts if math.isfinite(value)]
    if not lasts:
        return title
    if len(lasts) == 1:
        return f"{title} over steps; last value {short(finite[0]) if finite else 'nan'}"
    span = [f"{short(min(finite))} to {short(max(finite))}"] if finite else []
    nans = [f"nan in {len(lasts) - len(finite)}"] if len(finite) < len(lasts) else []
    return f"{title} over steps of {len(lasts)} runs; last values {', '.join(span + nans)}"


def _marks(runs: Sequence[RunData], x: Scale) -> Iterator[Mark]:
    """Yield a mark for each attempt that ended early, at its last row; highlighted runs come first."""
    for place, run in enumerate(runs):
        for attempt in run.attempts:
            step = attempt.last_step
            if attempt.cause not in _UNMARKED and step is not None and step >= 0:
                text = f"{run.name}: attempt {attempt.number} ended, {attempt.cause}, at step {step}"
                color = place if place < HIGHLIGHTED else None
                yield Mark(round(100 * x.place(float(step)), 2), color, text)
