"""Helpers of commands that read thousands of runs at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two looks for cyclic garbage; Python's own number is in the hundreds. Measured: with 10,000
#: runs a fifth of the time goes into looking at objects that are all needed.
_OBJECTS = 5_000_000


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Within this context Python looks less often for cyclic garbage, of which reading runs makes little."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
