"""Values with a unit, ``10min`` or ``64G``, for keys that take a number in a fixed one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.config.durations import seconds_in
from hpc_train.config.json_schema import Node
from hpc_train.config.keys import members
from hpc_train.config.problems import KeyPath


def in_unit_of(path: KeyPath, text: str, node: Node) -> str | None:
    """Return what to write for ``10min`` or ``64G`` where the key takes a number with a fixed unit; else
    None.
    """
    number = next((each for each in members(node) if each.get("type") in {"integer", "number"}), None)
    if number is None:
        return None
    unit = next((unit for ending, unit in _UNITS.items() if str(path[-1]).endswith(ending)), None)
    amount = None if unit is None else unit.amount(text)
    if unit is None and number.get("maximum") == 1 and (match := _PERCENT.fullmatch(text.strip())):
        return f"write {float(match[1]) / 100:g}"
    if unit is None or not amount:
        return None
    amount = math.ceil(amount) if number["type"] == "integer" else amount
    return f"write {amount:.10g} ({path[-1]} is in {unit.name})"


@dataclass(frozen=True)
class _Unit:
    """The unit of a key's number. ``amount`` parses a value with a unit; it returns None for other text."""

    name: str
    amount: Callable[[str], float | None]


def _in_time(seconds: int) -> Callable[[str], float | None]:
    def amount(text: str) -> float | None:
        found = seconds_in(text)
        return None if found is None else found / seconds

    return amount


def _in_gb(text: str) -> float | None:
    match = _MEMORY.fullmatch(text.strip().lower())
    return float(match[1]) * _GB[match[2]] if match else None


_GB = {"k": 1 / 1024**2, "m": 1 / 1024, "g": 1.0, "t": 1024.0}
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])i?b?", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
#: Suffix of a key → its unit.
_UNITS = {
    "_min": _Unit("minutes", _in_time(60)),
    "_s": _Unit("seconds", _in_time(1)),
    "_h": _Unit("hours", _in_time(3600)),
    "_gb": _Unit("GB", _in_gb),
}
