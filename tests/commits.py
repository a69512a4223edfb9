"""What is checked out, for results that are added to over several days."""

from __future__ import annotations

from pathlib import Path

from hpc_train.run.code.code_files import commit_of

REPOSITORY = Path(__file__).parents[1]


def commit() -> str:
    """Return ``d692430``, ``d692430-dirty`` where files differ from it, empty outside of a repository."""
    found = commit_of(REPOSITORY)
    return "" if found is None else found["commit"][:7] + ("-dirty" if found["dirty"] else "")
