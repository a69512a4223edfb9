"""The runs that a command reads, which may be thousands, and other users' in a shared runs folder."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.console import say
from hpc_train.errors import listed
from hpc_train.paths import RunPaths
from hpc_train.run.find import find_and_skip

#: Number of runs that are listed.
_NAMED = 5


def find_readable(names: Sequence[str]) -> list[RunPaths]:
    """Return ``find_runs`` of the words, and list those that can't be read (of all runs without words)."""
    runs, unreadable = find_and_skip(names)
    if unreadable:
        named = listed(list(map(str, unreadable)), _NAMED)
        say(f"skipped, since you may not read them: {named}; their owner can run `chmod -R go+rX`")
    return runs
