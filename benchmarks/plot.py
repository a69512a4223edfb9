"""Dot-and-whisker plots of ratios, as SVG. ``benchmarks.performance_page`` calls ``ratio_plot``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_ROW, _TOP, _BOTTOM, _PLOT, _CHARACTER = 28, 34, 46, 300, 7.8
_TICK_SPACING = 38
#: Multiples that get a tick in each decade, and steps between ticks, of which the finest that fits is used.
_DECADES = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
_STEPS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.background { fill: #ffffff } .grid { stroke: #d8dee4 } .baseline { stroke: #59636e; stroke-dasharray: 4 3 }
.peer, .ours { stroke-width: 2 }
.peer { stroke: #59636e; fill: #59636e } .ours { stroke: #0550ae; fill: #0550ae }
text { stroke: none !important } text.peer { fill: #1f2328 } text.ours { font-weight: bold }
text.tick { fill: #59636e }
@media (prefers-color-scheme: dark) {
text, text.peer, text.ours { fill: #e6edf3 } text.tick { fill: #9198a1 }
.background { fill: #15191f } .grid { stroke: #30363d } .baseline { stroke: #9198a1 }
.peer { stroke: #9198a1; fill: #9198a1 } .ours { stroke: #79c0ff; fill: #79c0ff }
}"""


def ratio_plot(
    title: str,
    baseline: str,
    arms: Mapping[str, Mapping[str, Any]],
    is_ours: Callable[[str], bool],
    quantity: str = "time",
) -> str:
    """Return an SVG with a row per arm: a dot at the median ratio, a whisker from p10 to p90.

    ``arms``: the spread of the ratio to ``baseline`` by arm; a p10 or p90 of None draws no whisker. The axis
    is logarithmic. Text is text, and the colors follow the reader's color scheme.
    """
    left = 24 + _CHARACTER * max(map(len, arms))
    right = 24 + _CHARACTER * max(len(label(ratio)) for ratio in arms.values())
    width, height = left + _PLOT + right, _TOP + _ROW * len(arms) + _BOTTOM
    low, high = _domain(arms.values())

    def x(ratio: float) -> float:
        return left + _PLOT * (math.log(ratio) - math.log(low)) / (math.log(high) - math.log(low))

    bottom = _TOP + _ROW * len(arms)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
            f' height="{height}" role="img" aria-labelledby="title description">'
        ),
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description(baseline, arms, quantity))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="background" width="{width:.0f}" height="{height}" rx="6"/>',
        *_axis(x, _ticks(low, high, x), bottom, f"{quantity} relative to {baseline}", left + _PLOT / 2),
        f'<line class="baseline" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{_TOP - 8}" y2="{bottom}"/>',
    ]
    for row, (arm, ratio) in enumerate(arms.items()):
        kind = "ours" if is_ours(arm) else "peer"
        parts += _arm(arm, ratio, kind, x, _TOP + _ROW * (row + 0.5), left)
    return "\n".join([*parts, "</svg>", ""])


def description(baseline: str, arms: Mapping[str, Mapping[str, Any]], quantity: str = "time") -> str:
    """Return the plot in words, for who can't see it."""
    shown = "; ".join(f"{arm}: {label(ratio)}" for arm, ratio in arms.items())
    return f"{quantity[0].upper()}{quantity[1:]} relative to {baseline}. {shown}"


def label(ratio: Mapping[str, Any]) -> str:
    """Return ``1.43 (1.36–1.5)``: the median, and p10–p90 if they are known and differ."""
    if ratio["median"] == ratio["p10"] == ratio["p90"] == 1:
        return "1"  # the baseline
    median = number(ratio["median"])
    is_known = ratio["p10"] is not None and ratio["p90"] is not None
    return f"{median} ({number(ratio['p10'])}–{number(ratio['p90'])})" if is_known else median


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    digits = max(2 - math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:,.{digits}f}"


def _domain(ratios: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    known = [value for ratio in ratios for value in ratio.values() if value is not None] + [1.0]
    margin = max(max(known) / min(known), 1.1) ** 0.06
    return min(known) / margin, max(known) * margin


def _ticks(low: float, high: float, x: Callable[[float], float]) -> list[float]:
    decades = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    rows = [[multiple * decade for decade in decades for multiple in multiples] for multiples in _DECADES]
    if high / low < 10:
        rows += [[step * number for number in range(1, math.ceil(high / step))] for step in _STEPS]
    inside = [[tick for tick in row if low <= tick <= high] for row in rows]
    return max((row for row in inside if _fits(row, x)), key=len)


def _fits(ticks: Sequence[float], x: Callable[[float], float]) -> bool:
    return all(x(after) - x(before) >= _TICK_SPACING for before, after in itertools.pairwise(ticks))


def _axis(
    x: Callable[[float], float], ticks: Sequence[float], bottom: float, name: str, middle: float
) -> list[str]:
    parts = [
        f'<text class="tick" x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escape(name)}</text>'
    ]
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP - 4}" y2="{bottom}"/>'
        )
        text = f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
        parts.append(f"{text}{round(tick, 9):g}</text>")
    return parts


def _arm(
    arm: str, ratio: Mapping[str, Any], kind: str, x: Callable[[float], float], y: float, left: float
) -> list[str]:
    parts = [f'<text class="{kind}" x="{left - 12:.1f}" y="{y + 4.5}" text-anchor="end">{escape(arm)}</text>']
    if ratio["p10"] is not None and ratio["p90"] is not None:
        low, high = x(ratio["p10"]), x(ratio["p90"])
        parts.append(
            f'<path class="{kind}" d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 4}v8M{high:.1f} {y - 4}v8"/>'
        )
    parts.append(f'<circle class="{kind}" cx="{x(ratio["median"]):.1f}" cy="{y}" r="5"/>')
    parts.append(f'<text x="{left + _PLOT + 12:.1f}" y="{y + 4.5}">{label(ratio)}</text>')
    return parts
