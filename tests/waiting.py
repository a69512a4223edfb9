"""Waiting for what ranks and Slurm do, without taking the cores that they need."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S = 0.01
#: A question may take this share of a core, whether it reads a file or runs a command of a second.
_SHARE = 0.2


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
        time.sleep(max(_SHORTEST_S, (now - asked) * (1 / _SHARE - 1)))
