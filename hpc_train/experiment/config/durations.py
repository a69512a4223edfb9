"""Durations as people write them for Slurm: ``90min``, ``24h``, ``2d``, ``24:00:00``, ``2-12:00:00``."""

from __future__ import annotations

import math
import re

#: Words for units of time, in seconds.
_WORDS_S = {
    1: "s sec secs second seconds",
    60: "m min mins minute minutes",
    3600: "h hr hrs hour hours",
    86400: "d day days",
}
_SECONDS = {word: seconds for seconds, words in _WORDS_S.items() for word in words.split()}
_MEASURE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]{1,7})", re.ASCII)
_UNITS_MIN = {"min": 1, "h": 60, "d": 24 * 60}
_WITH_UNIT = re.compile(r"(\d{1,6})\s*(min|h|d)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):(\d{2}):(\d{2})", re.ASCII)
#: Of keys in hours: keeps deadlines within what a ``timedelta`` holds.
MAX_HOURS = 1_000_000
FORMS = "24h, or a duration like 90min, 2d, 24:00:00 or 2-12:00:00"


def parse_duration_min(text: str) -> int:
    """Return the duration in whole minutes, seconds rounded up. Raises ValueError, which lists the valid
    forms.
    """
    if match := _WITH_UNIT.fullmatch(text.strip()):
        minutes = int(match[1]) * _UNITS_MIN[match[2]]
    elif match := _CLOCK.fullmatch(text.strip()):
        days, hours, mins, secs = (int(part or 0) for part in match.groups())
        if mins > 59 or secs > 59:
            raise ValueError(f"{text!r} has over 59 minutes or seconds; write {FORMS}")
        minutes = (days * 24 + hours) * 60 + mins + (secs > 0)
    else:
        seconds = seconds_in(text)
        meant = format_duration(math.ceil(seconds / 60)) if seconds else FORMS
        raise ValueError(f"{text!r} is not a duration; write {meant}")
    if minutes < 1:
        raise ValueError(f"{text!r} is zero; write at least 1min")
    return minutes


def format_duration(minutes: int) -> str:
    """Return minutes in the shortest form that ``parse_duration_min`` reads back."""
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}min"


def seconds_in(text: str) -> float | None:
    """Return the seconds that ``10 minutes``, ``1.5h`` or ``90s`` mean; None for anything else."""
    match = _MEASURE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _SECONDS:
        return None
    return float(match[1]) * _SECONDS[match[2]]
