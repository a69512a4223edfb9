"""``run.json`` for commands that need it in several places, as ``status`` of thousands of runs does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.files import read_json

#: More runs than a user has: with one more than this, each entry would be evicted before it is needed again.
#: An entry takes a few kilobytes.
_MAX_RUNS = 100_000


def run_facts(paths: RunPaths) -> Mapping[str, Any]:
    """Return the content of ``run.json``, empty if it can't be read; callers must not change it.

    The file is read again only if it was replaced since.
    """
    try:
        seen = os.stat(paths.run)  # noqa: PTH116  (this is called for each run)
    except OSError:
        return {}
    return _read(str(paths.run), seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def recorded_values(paths: RunPaths) -> Mapping[str, Any]:
    """Return the keys that the sweep varied and the run's values; empty if they can't be read."""
    values = run_facts(paths).get("values")
    return values if isinstance(values, dict) else {}


def extended_run(paths: RunPaths) -> RunPaths | None:
    """Return the completed run that this one extends, which may be gone; None if it began at step 0."""
    name = Path(str((run_facts(paths).get("extends") or {}).get("run", ""))).name
    return RunPaths(paths.siblings.folder / name) if name else None


def extensions(paths: RunPaths) -> list[str]:
    """Return the ids of the runs that extend this one, oldest first."""
    return list(run_facts(paths).get("extended_by") or ())


def extension_words(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of the run that this one extends, and of those that extend it.

    ``facts``: ``run_facts`` of the run.
    """
    old = facts.get("extends")
    words = [("extends", f"{old.get('run')} from step {old.get('step')}")] if old else []
    return words + [("extended by", name) for name in facts.get("extended_by") or ()]


@lru_cache(_MAX_RUNS)
def _read(path: str, inode: int, size: int, modified_ns: int, changed_ns: int) -> Mapping[str, Any]:
    return read_json(Path(path)) or {}
