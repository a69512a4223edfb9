"""Waiting for what ranks and Slurm do, without taking the cores that they need."""

from __future__ import annotations

import time
from collections.abc import Callable

#: For waits that only a hang can exceed, also on a machine with several times as many processes as cores.
HANG_LIMIT_S = 300.0
_SHORTEST_S = 0.02
#: A question may take this share of a core; the pauses for that are at most so long, unless it takes a second
#: share.
_SHARE, _LONGEST_S, _SECOND_SHARE = 0.02, 0.5, 0.2


def came_true(is_so: Callable[[], object], limit_s: float) -> bool:
    """Ask again and again; tell whether it was so within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        asked = time.monotonic()
        if is_so():
            return True
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(_pause_s(now - asked))


def _pause_s(took_s: float) -> float:
    """Return the pause after a question that took so long: a file's milliseconds, or a command's second."""
    usual, least = (took_s * (1 / share - 1) for share in (_SHARE, _SECOND_SHARE))
    return max(_SHORTEST_S, min(usual, _LONGEST_S), least)
