"""Snapshots of code that no run uses any more: their runs were removed by hand, or took newer code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_train.paths import RunPaths

#: A submit takes its snapshot before it makes the runs that link there. Assumed.
MIN_AGE_S = 3600.0


def unused_snapshots(snapshots: Path) -> list[Path]:
    """Return what lies in ``runs/.code`` that no run below ``runs`` links to; nothing that is new.

    Raises OSError where a folder of this user's can't be read: a run in it may use any of them. Other users'
    runs have snapshots of their own.
    """
    if not snapshots.is_dir():
        return []
    old = [path for path in snapshots.iterdir() if _is_old_folder(path)]
    used = set(_used(snapshots.parent)) if old else set()
    return sorted(path for path in old if not {_normal(path), path.resolve()} & used)


def _is_old_folder(path: Path) -> bool:
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_dir() and not path.is_symlink() and time.time() - seen.st_mtime > MIN_AGE_S


def _used(runs: Path) -> Iterator[Path]:
    """Yield where the runs' links lead, those of runs that are only being made too."""
    for experiment in _folders(runs):
        for run in _folders(experiment):
            code = RunPaths(run).code
            if code.is_symlink():
                yield _normal(run / code.readlink())
                yield code.resolve()


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except PermissionError:
        if parent.stat().st_uid == os.geteuid():
            raise
        return []


def _normal(path: Path) -> Path:
    """Return the path without ``..``, links kept: as ``snapshot.linked`` finds it."""
    return Path(os.path.normpath(path.absolute()))
