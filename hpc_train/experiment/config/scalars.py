"""The values of unquoted text in YAML, and the numbers that people mean by text that is not one.

``marked_yaml`` reads a file by it; ``remedies`` and ``explanations`` suggest what to write instead of text.
"""

from __future__ import annotations

import math
import re
import unicodedata

#: Python refuses to print or read integers of more than 4300 digits.
MAX_NUMBER_LENGTH = 100
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
#: ``0,1`` or ``50,000``
COMMA = re.compile(r"[+-]?(\d+),(\d+)(?:[eE][+-]?\d+)?")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_PLAIN = re.compile(rf"({_NUMBER})[fFlL]?", re.ASCII)
_SCALED = re.compile(rf"({_NUMBER})\s*([kKMB])", re.ASCII)
_OPERATION = re.compile(rf"({_NUMBER})\s*(\*\*|[*/^x×])\s*({_NUMBER})", re.ASCII)
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
#: Units of memory in GB.
_GB = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_RANGE = re.compile(r"range\((-?\d{1,9})(?:, *(-?\d{1,9}))?\)|(\d{1,9})(?:-|\.\.+|:)(\d{1,9})", re.ASCII)
#: A longer range is not written out.
_MAX_RANGE = 32
#: Fewer and equal numbers of ``[3, 224, 224]`` are channels.
_MAX_CHANNELS = 4
#: Characters that look like others, and blanks without a width.
_LOOK_ALIKES = str.maketrans(dict.fromkeys("‐‑‒–—−", "-") | dict.fromkeys("\u200b\ufeff_", ""))


def resolve_scalar(text: str) -> object:
    """Return the value of an unquoted scalar in YAML 1.2's core schema. Raises ValueError on huge numbers."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    if text in _NAN:
        return float("nan")
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(_bounded(text), base) if base == 10 else int(_bounded(text)[2:], base)
    return float(_bounded(text)) if _FLOAT.fullmatch(text) else text


def _bounded(text: str) -> str:
    if len(text) > MAX_NUMBER_LENGTH:
        raise ValueError(f"is a number of more than {MAX_NUMBER_LENGTH} digits")
    return text


def with_point(comma: re.Match[str]) -> str:
    """Return the number that a match of ``COMMA`` means."""
    is_thousands = comma[1] != "0" and len(comma[2]) == 3
    return comma[0].replace(",", "" if is_thousands else ".")


def reads_as_number(text: str) -> bool:
    """Return True if the unquoted text is a number."""
    try:
        value = resolve_scalar(text)
    except ValueError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_in(text: str) -> str | None:
    """Return the number that ``10k``, ``1_000``, ``2^-8``, ``1/256`` or full-width digits mean, as YAML has
    it; None for other text.
    """
    plain = unicodedata.normalize("NFKC", text[:MAX_NUMBER_LENGTH]).translate(_LOOK_ALIKES).partition("#")[0]
    plain = plain.strip(" \t,;=")
    if match := _PLAIN.fullmatch(plain):
        return match[1]
    try:
        if match := _SCALED.fullmatch(plain):
            value = float(match[1]) * _SCALES[match[2]]
        elif match := _OPERATION.fullmatch(plain):
            left, right = float(match[1]), float(match[3])
            is_power = match[2] in {"**", "^"}
            value = left**right if is_power else left / right if match[2] == "/" else left * right
        else:
            return None
        return f"{value:.10g}" if math.isfinite(value) else None
    except (ArithmeticError, TypeError):  # TypeError: a complex power
        return None


def gigabytes(text: str) -> float | None:
    """Return the GB that ``64G``, ``64000M`` or, in Slurm's unit, ``64000`` mean; None for other text."""
    match = _MEMORY.fullmatch(text.strip())
    return float(match[1]) * _GB[match[2].upper()] if match else None


def range_in(text: str) -> list[int] | None:
    """Return the numbers that ``range(3)``, ``0..2`` or ``0-2`` mean; None for other text, or for many."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    bounds = [int(number) for number in match.groups() if number is not None]
    numbers = range(*bounds) if match[1] else range(bounds[0], bounds[1] + 1)
    return list(numbers) if 0 < len(numbers) <= _MAX_RANGE else None


def sides_in(value: object) -> str | None:
    """Return the sides in pixels of ``224x224`` or ``[3, 224, 224]``."""
    numbers = [int(number) for number in re.findall(r"\d{1,4}", str(value)[:MAX_NUMBER_LENGTH])]
    sides = [number for number in numbers if number > _MAX_CHANNELS] if len(numbers) > 2 else numbers
    if len(sides) != 2 or not isinstance(value, str | list) or value == sides:
        return None
    return str(sides[0] if sides[0] == sides[1] else sides)
