"""Curves for a terminal: lines of text, drawn with the 2 × 4 dots of braille characters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from hpc_train.errors import shortened

#: Steps and values, in the order of steps.
Points = Sequence[tuple[float, float]]
#: Lines of a chart's title and of its steps, below which two lines of dots are legible. Assumed.
MIN_LINES = 5
#: Columns of the labels of values, between two charts, and of the narrowest chart.
_LABELS, _GAP, _MIN_WIDTH = 9, 3, 34
#: Positive values that span more than this factor have a logarithmic scale. Assumed.
_LOG_FROM = 50.0
#: Bits of the dots of a braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def charts(curves: Mapping[str, Points], width: int, height: int) -> list[tuple[str, str]]:
    """Return the curves side by side as titles and lines, ``height`` of them; none without two points.

    As many as fit ``width``. Values that are not finite are not drawn.
    """
    finite = {
        title: [point for point in points if math.isfinite(point[1])] for title, points in curves.items()
    }
    shown = [(title, points) for title, points in finite.items() if len(points) > 1]
    shown = shown[: max(1, (width + _GAP) // (_MIN_WIDTH + _GAP))]
    if not shown or height < MIN_LINES:
        return []
    place = (width + _GAP) // len(shown) - _GAP
    drawn = [_chart(title, points, place, height) for title, points in shown]
    titles, *lines = ((" " * _GAP).join(parts) for parts in zip(*drawn, strict=True))
    return [(titles, ""), *(("", line) for line in lines)]


def _chart(title: str, points: Points, width: int, height: int) -> list[str]:
    """Return ``height`` lines of ``width`` characters: title, curve with its labels, first and last step."""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > _LOG_FROM
    columns = width - _LABELS - 1
    rows = _dots(
        [(step, math.log(value) if is_log else value) for step, value in points], columns, height - 2
    )
    labels = [f"{high:.3g}", *[""] * (height - 4), f"{low:.3g}"]
    first, last = (f"{points[place][0]:g}" for place in (0, -1))
    head = f"{title}{', logarithmic' if is_log else ''}: {values[-1]:.4g} at step {last}"
    steps = f"{'step':>{_LABELS}} {first}{last.rjust(max(0, columns - len(first)))}"
    curve = [f"{label:>{_LABELS}} {row}" for label, row in zip(labels, rows, strict=True)]
    return [shortened(line, width).ljust(width) for line in (head, *curve, steps)]


def _dots(points: Points, columns: int, lines: int) -> list[str]:
    """Return the curve as ``lines`` of ``columns`` braille characters."""
    heights = _heights(points, 2 * columns, 4 * lines)
    cells = [[0] * columns for _ in range(lines)]
    for x, y in enumerate(heights):
        low, high = sorted((heights[max(0, x - 1)], y))
        for row in {y, *range(low + 1, high)}:  # a steep part without gaps
            cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _heights(points: Points, columns: int, rows: int) -> list[int]:
    """Return for each column of dots the row of the curve, 0 at the top."""
    first, last = points[0][0], points[-1][0]
    low, high = (limit(value for _, value in points) for limit in (min, max))
    span = high / 2 - low / 2  # halves: no overflow

    def column(point: tuple[float, float]) -> int:
        return round((point[0] - first) / (last - first) * (columns - 1)) if last > first else 0

    means = {x: _mean([value for _, value in group]) for x, group in groupby(points, column)}
    known = sorted(means)
    heights, place = [], 0
    for x in range(columns):
        while place + 1 < len(known) and known[place + 1] <= x:
            place += 1
        left, right = known[place], known[min(place + 1, len(known) - 1)]
        share = (x - left) / (right - left) if right > left else 0.0
        value = means[left] * (1 - share) + means[right] * share
        heights.append(round((1 - ((value / 2 - low / 2) / span if span > 0 else 0.5)) * (rows - 1)))
    return heights


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)
