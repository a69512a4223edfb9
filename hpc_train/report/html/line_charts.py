"""Curves of all runs, one chart per metric, as paths on a grid of 1000 × 1000 that the page stretches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hpc_train.errors import counted
from hpc_train.report.html.collecting import CLASSES, DATA_WAIT, MAX_STEP, Collected, Curve, RunData
from hpc_train.report.html.limits import ALL_POINTS, CHARTS, CURVE_POINTS, HIGHLIGHTED, SPIKES
from hpc_train.report.metrics_reader import Metric
from hpc_train.run.spikes import Spike, read_spikes

if TYPE_CHECKING:
    from markupsafe import Markup

GRID = 1000
#: A positive range that spans more than this factor is shown on a logarithmic scale. Assumed.
_LOG_FROM = 50.0
#: Shown as throughput and data wait.
_SHOWN_ELSEWHERE = {Metric("train", "step_s"), Metric("train", "data_wait_s")}
#: Training metrics in the order of their charts; others follow.
_TRAINING = (
    "loss", "accuracy", "lr", "samples_per_s", "tokens_per_s", DATA_WAIT.name, "peak_memory_gib", "mfu",
    "grad_norm", "tflops_per_s",
)  # fmt: skip
#: Title of a chart and name of its vertical axis, if they are not the metric and its name.
_TITLES = {
    "train/lr": ("Learning rate", "lr"),
    "train/samples_per_s": ("Throughput", "samples/s"),
    "train/tokens_per_s": ("Throughput", "tokens/s"),
    f"train/{DATA_WAIT.name}": ("Data wait", "% of the step"),
    "train/peak_memory_gib": ("Peak memory", "GiB"),
    "train/mfu": ("Model FLOPs utilization", "mfu"),
    "train/grad_norm": ("Gradient norm", "grad_norm"),
    "train/tflops_per_s": ("Arithmetic throughput", "TFLOP/s"),
}


#: The charts that mark spikes, and the height of a mark.
_MARKED: dict[Metric, Callable[[Spike], float | None]] = {
    Metric("train", name): attrgetter(name) for name in ("loss", "grad_norm")
}


@dataclass(frozen=True)
class Scale:
    """Maps ``low``…``high`` to 0…1."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Sequence[float]) -> Scale:
        """Return a scale with room for all values, which are finite."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if low > 0 and high / low > _LOG_FROM:
            return cls(low / 1.1, _bounded(high * 1.1), is_log=True)
        margin = 0.1 * (high / 2 - low / 2)  # their difference may overflow
        if low == high:
            margin = abs(low) * 0.1 or 1.0
        return cls(_bounded(low - margin), _bounded(high + margin))

    def place(self, value: float) -> float:
        """Return the position of ``value``, from 0 to 1."""
        return self.places([value])[0]

    def places(self, values: Iterable[float]) -> list[float]:
        """Return the positions of the values, each from 0 to 1."""
        if self.is_log:
            low = _log(self.low)
            span = _log(self.high) - low
            above = [_log(value) - low for value in values]
        else:
            low = self.low / 2  # halves: the difference of two floats may overflow
            span = self.high / 2 - low
            above = [value / 2 - low for value in values]
        if not span > 0:  # or not a number
            return [0.5] * len(above)
        shares = [part / span for part in above]
        if shares and min(shares) >= 0 and max(shares) <= 1:  # most are: the scale is made of the values
            return shares
        return [min(max(share, 0.0), 1.0) for share in shares]

    def ticks(self, about: int = 4) -> list[float]:
        """Return about this many round numbers within the scale, in ascending order."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, round((last - first) / about))
            powers = [10.0**power for power in range(first, last + 1, every)]
            if len(powers) > 1:
                return powers
        return _round_numbers(self.low, self.high, about)


@dataclass(frozen=True)
class Line:
    """One run's curve; ``color`` is the number of its color, None in the background."""

    run: int
    color: int | None
    path: str
    curve: Curve
    #: The only point of the curve, in percent from the left and the top.
    dot: tuple[float, float] | None


@dataclass(frozen=True)
class Mark:
    """A spike of a highlighted run; ``place``: in percent from the left and the top."""

    run: int
    step: int
    title: str
    place: tuple[float, float]


@dataclass(frozen=True)
class LineChart:
    """One metric of all runs."""

    title: str
    #: Name of the vertical axis.
    unit: str
    metric: Metric
    lines: list[Line]
    x: Scale
    y: Scale
    #: Description of the chart for screen readers.
    summary: str
    #: Number of runs of its experiments without a value.
    missing: int
    marks: list[Mark]

    @property
    def notes(self) -> list[str]:
        """Return the features that a plain chart lacks: a scale, runs without a value, spikes."""
        without = f"{counted(self.missing, 'run')} {'has' if self.missing == 1 else 'have'} no value"
        spikes = [f"▼ {counted(len(self.marks), 'spike')}"] if self.marks else []
        return ["log scale"] * self.y.is_log + [without] * (self.missing > 0) + spikes

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
        """The curves without a color as SVG: a loop of the template takes seconds for thousands of runs."""
        from markupsafe import Markup  # with the template engine

        paths = ((line.run, line.path) for line in self.lines if line.color is None)
        return Markup(
            "".join(f'<path class="curve rest" data-run="{run:d}" d="{path}"/>\n' for run, path in paths)
        )

    @property
    def highlighted(self) -> list[Line]:
        """The curves with a color, drawn on top of the others."""
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
            "spikes": [[mark.run, mark.step, mark.title] for mark in self.marks],
        }


def line_charts(collected: Collected) -> list[LineChart]:
    """Return the charts: first the metric by which runs are compared, then other metrics of evaluations."""
    metrics = list(_ordered(collected))[:CHARTS]
    num_curves = sum(metric in run.curves for run in collected.runs for metric in metrics)
    max_points = min(CURVE_POINTS, max(4, ALL_POINTS // max(num_curves, 1)))
    spikes = [_newest_spikes(run) for run in collected.runs[:HIGHLIGHTED]]
    steps = [curve.steps[-1] for run in collected.runs for curve in run.curves.values() if curve]
    steps += [spike.step for listed in spikes for spike in listed]
    x = Scale(0.0, float(max(steps, default=1) or 1))
    return [_chart(metric, collected, x, max_points, spikes) for metric in metrics]


def _newest_spikes(run: RunData) -> list[Spike]:
    return list(deque((spike for spike in read_spikes(run.paths) if spike.step < MAX_STEP), SPIKES))


def _ordered(collected: Collected) -> Iterator[Metric]:
    """Yield the metrics that have a chart; classes' IoU has a separate section."""
    if collected.metric is not None:
        yield collected.metric
    rest = [
        metric
        for metric in collected.metrics
        if not metric.name.startswith(CLASSES) and metric not in {*_SHOWN_ELSEWHERE, collected.metric}
    ]
    yield from (metric for metric in rest if metric.split != "train")
    places = {name: place for place, name in enumerate(_TRAINING)}
    training = [metric for metric in rest if metric.split == "train"]
    yield from sorted(training, key=lambda metric: places.get(metric.name, len(places)))


def _chart(
    metric: Metric, collected: Collected, x: Scale, max_points: int, spikes: Sequence[Sequence[Spike]]
) -> LineChart:
    curves = [(place, curve) for place, run in enumerate(collected.runs) if (curve := run.curves.get(metric))]
    values = [value for _, curve in curves for value in (min(curve.values), max(curve.values))]
    y = Scale.over(values)
    # The best run is drawn last, on top of the others.
    lines = [_line(place, curve, x, y, max_points) for place, curve in reversed(curves)]
    title, unit = _TITLES.get(str(metric), (str(metric), metric.name))
    runs = [collected.runs[place] for place, _ in curves]
    experiments = {run.experiment for run in runs}
    missing = sum(run.experiment in experiments for run in collected.runs) - len(runs)
    marks = list(_marks(metric, spikes, x, y))
    summary = _summary(metric, title, runs) + (f"; {counted(len(marks), 'spike')}" if marks else "")
    return LineChart(title, unit, metric, lines, x, y, summary, missing, marks)


def _marks(metric: Metric, spikes: Sequence[Sequence[Spike]], x: Scale, y: Scale) -> Iterator[Mark]:
    """Yield the marks; a number beyond the scale, which rows of other steps determine, is at its edge."""
    for run, listed in enumerate(spikes if metric in _MARKED else ()):
        for spike in listed:
            value = _MARKED[metric](spike)
            if value is not None and math.isfinite(value):
                place = (round(100 * x.place(spike.step), 2), round(100 - 100 * y.place(value), 2))
                yield Mark(run, spike.step, f"spike at {spike}", place)


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
        return f"{title} over steps; last value {short(finite[0]) if finite else 'NaN'}"
    span = [f"{short(min(finite))} to {short(max(finite))}"] if finite else []
    nans = [f"NaN in {len(lasts) - len(finite)}"] if len(finite) < len(lasts) else []
    return f"{title} over steps of {len(lasts)} runs; last values {', '.join(span + nans)}"


def _log(value: float) -> float:
    return math.log(max(value, 5e-324))


def _bounded(value: float) -> float:
    return min(max(value, -1.7e308), 1.7e308)


def _round_numbers(low: float, high: float, about: int) -> list[float]:
    raw = high / about - low / about
    if not 1e-300 < raw < 1e300:
        return [low, high]
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    numbers = ((first + count) * step for count in range(about + 3))
    return [value for value in numbers if low <= value <= high + step * 1e-9]


def short(value: float) -> str:
    """Return a number with at most four digits: ``0.9312``, ``12,000``, ``1e-05``."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"
