"""Slurm's lists of nodes, such as ``n[1-2,07],login1``, as names."""

from __future__ import annotations

import re

_ITEM = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")
_BRACKETS = re.compile(r"([^\[\]]*)\[([\d,-]+)\](.*)")
#: A list of more nodes is not expanded: no cluster has them.
_MAX_NODES = 100_000


def expanded(listed: str) -> list[str]:
    """Return the names in the list; empty for a path (sbatch reads a file then) or an invalid list."""
    if "/" in listed:
        return []
    names = [name for item in _ITEM.findall(listed) if item for name in _expanded(item)]
    return names if len(names) <= _MAX_NODES else []


def _expanded(item: str) -> list[str]:
    match = _BRACKETS.fullmatch(item)
    if match is None:
        return [item] if "[" not in item else []
    before, ranges, after = match.groups()
    ends = _expanded(after) if after else [""]
    numbers: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) - int(low) >= _MAX_NODES:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return [f"{before}{number}{end}" for number in numbers for end in ends]
