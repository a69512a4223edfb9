"""Runs that a command skips because this user may not read them: those of others in a shared runs folder."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.cli.printing import say
from hpc_train.run_folder.finding import unreadable

#: So many are named.
_NAMED = 5


def say_unreadable(words: Sequence[str]) -> None:
    """Name the runs and experiments that can't be read, of those that ``words`` name, or of all."""
    found = [path for path in unreadable() if not words or {path.name, path.parent.name} & set(words)]
    if found:
        named = ", ".join(str(path) for path in found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
        say(f"skipped, for you may not read them: {named}; their owner can run `chmod -R go+rX`")
