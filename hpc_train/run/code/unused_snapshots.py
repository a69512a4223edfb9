"""Snapshots of code that no run uses any more, because runs were removed manually or use newer code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_train.paths import RunPaths

#: A submit takes its snapshot before it creates the runs that link to it. Assumed.
MIN_AGE_S = 3600.0


def unused_snapshots(snapshots: Path) -> list[Path]:
    """Return the entries of ``runs/.code`` that no run below ``runs`` links to, except recent ones.

    Raises OSError if a folder of this user can't be read: a run in it may use any of them. Other users' runs
    have their own snapshots.
    """
    if not snapshots.is_dir():
        return []
    old = [path for path in snapshots.iterdir() if _is_old_folder(path)]
    used = set(_used(snapshots.parent)) if old else set()
    return sorted(path for path in old if not {_normal(path), _real(path)} & used)


def _is_old_folder(path: Path) -> bool:
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_dir() and not path.is_symlink() and time.time() - seen.st_mtime > MIN_AGE_S


def _used(runs: Path) -> Iterator[Path]:
    """Yield the targets of the runs' links, including runs that are still being created."""
    for experiment in _folders(runs):
        for run in _folders(experiment):
            code = RunPaths(run).code
            if code.is_symlink():
                yield _normal(run / code.readlink())
                yield _real(code)


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except PermissionError:
        if parent.stat().st_uid == os.geteuid():
            raise
        return []


def _real(path: Path) -> Path:
    """Return the path with links resolved; keeps a link to itself, for which ``Path.resolve`` raises."""
    return Path(os.path.realpath(path))


def _normal(path: Path) -> Path:
    """Return the path without ``..``, with links kept, as ``snapshot.linked`` does."""
    return Path(os.path.normpath(path.absolute()))
