"""Random values of a sweep's parameters.

A draw is a hash of (seed, number, key), so that more draws, or another parameter, do not change it. A new
value of ``choice`` changes only the draws that get it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_train.config.sweep_sections import CHOICE, Distribution, RandomConfig

#: Significant digits of a drawn float: readable, and independent of the last bits of the math library.
_DIGITS = 6
#: Digits for draws with a step, whose multiples must stay multiples.
_STEP_DIGITS = 12
#: Bits that a float represents exactly.
_BITS = 53


def draws(random: RandomConfig) -> Iterator[dict[str, Any]]:
    """Yield the values of each draw by key; conditions are not applied."""
    for number in range(random.count):
        yield {
            key: draw(distribution, (random.seed, number, key))
            for key, distribution in random.parameters.items()
        }


def draw(distribution: Distribution, counter: tuple[Any, ...]) -> Any:
    """Return the value that belongs to ``counter``, a tuple of JSON values."""
    if distribution.choice is not None:
        return max(distribution.choice, key=lambda value: _hash(*counter, value))
    share = _hash(*counter) / 2**_BITS
    low, high = distribution.bounds
    if distribution.step is not None:
        steps = math.floor(share * (distribution.last_step + 1))
        return rounded(low + steps * distribution.step, distribution)
    if distribution.is_whole:
        high += 1
    if distribution.kind.startswith("log_"):
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    return rounded(math.floor(value) if distribution.is_whole else value, distribution)


def rounded(value: Any, distribution: Distribution) -> Any:
    """Return a value as it is written into a file: a float with few digits, within the bounds."""
    if distribution.kind == CHOICE:
        return value
    low, high = distribution.bounds
    if distribution.is_whole:
        return min(max(round(value), round(low)), round(high))
    digits = _DIGITS if distribution.step is None else _STEP_DIGITS
    return min(max(float(f"{value:.{digits}g}"), float(low)), float(high))


def examples(parameters: Mapping[str, Distribution]) -> Iterator[dict[str, Any]]:
    """Yield values that together contain each choice and the bounds of each range."""
    for number in range(max((len(each.ends) for each in parameters.values()), default=0)):
        yield {key: rounded(each.ends[number % len(each.ends)], each) for key, each in parameters.items()}


def _hash(*parts: Any) -> int:
    """Return a number of ``_BITS`` bits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)
