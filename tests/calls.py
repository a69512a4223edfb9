"""Work counted rather than timed: what a test asserts of a cost must hold on a slow machine too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions, Python's and C's, ``function`` calls in this thread.

    It runs twice; the first time, which fills caches, is not counted.
    """
    function()
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
