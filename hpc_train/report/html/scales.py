"""Axes: values → positions, and round numbers as labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A positive range that spans more than this factor is shown on a logarithmic scale. Assumed.
_LOG_FROM = 50.0


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
        return [min(max(each / span, 0.0), 1.0) if span > 0 else 0.5 for each in above]

    def ticks(self, about: int = 4) -> list[float]:
        """Return about this many round numbers within the scale, in ascending order."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, round((last - first) / about))
            found = [10.0**power for power in range(first, last + 1, every)]
            if len(found) > 1:
                return found
        return _round_numbers(self.low, self.high, about)


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
    found = [(first + count) * step for count in range(about + 3)]
    return [value for value in found if low <= value <= high + step * 1e-9]


def short(value: float) -> str:
    """Return a number with at most four digits: ``0.9312``, ``12,000``, ``1e-05``."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"
