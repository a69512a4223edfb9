"""The runs that a command reads, which may be thousands, and other users' in a shared runs folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpc_train.console import say
from hpc_train.errors import listed
from hpc_train.paths import RunPaths
from hpc_train.run.find import find_and_skip

#: Threshold of new objects for the cyclic garbage collector; Python's default is in the hundreds. Measured:
#: with 10,000 runs, a fifth of the time is spent on collections that free nothing.
_OBJECTS = 5_000_000

#: Number of runs that are listed.
_NAMED = 5


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Run the cyclic garbage collector less often in this context: reading runs creates few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def find_readable(names: Sequence[str]) -> list[RunPaths]:
    """Return ``find_runs`` of the words, and list those that can't be read (of all runs without words)."""
    runs, unreadable = find_and_skip(names)
    if unreadable:
        named = listed(list(map(str, unreadable)), _NAMED)
        say(f"skipped, since you may not read them: {named}; their owner can run `chmod -R go+rX`")
    return runs
