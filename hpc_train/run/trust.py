"""Whether another user could have written the files that a run executes.

A run folder names code to import (``experiment.yaml``), processes to signal (``attempt.json``) and caches to
load, so ``submit``, ``resume`` and the batch script check it before they start anything. Root and the user
who runs the command are trusted. The rules, from the inside out:

- A snapshot of the code, and everything below it: owned by a trusted user, not writable by group or others.
- The run folder: the same. If other users can enter it (``chmod go+rx``), everything below it too.
- The experiment's folder, ``.slurm`` and ``.code``: the same, except that write permission with the sticky
  bit is accepted, which keeps other users from replacing our files.
- The runs folder: may belong to anyone and be writable by a group (a project's shared folder), and by
  everyone with the sticky bit (``/tmp``). Without the sticky bit a member can rename its entries, but can
  only put their own folders in place, which the rules above reject. Its parents are not checked.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.paths import ExperimentPaths, RunPaths

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_ENTERABLE = stat.S_IXGRP | stat.S_IXOTH


class UntrustedError(UserError):
    """Another user could have written the files that a run would execute."""


def make_experiment_folder(folder: ExperimentPaths) -> None:
    """Create ``runs/<name>``, private to its owner. Raises UntrustedError if an existing one is not."""
    folder.folder.parent.mkdir(parents=True, exist_ok=True)
    folder.folder.mkdir(mode=0o700, exist_ok=True)
    check_experiment_folder(folder)


def check_experiment_folder(folder: ExperimentPaths) -> None:
    """Raise UntrustedError if another user could replace a run of the experiment or its batch jobs."""
    mode = folder.folder.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UntrustedError(_writable(folder.folder.parent, "+t"))
    check_holder(folder.folder)
    if folder.submissions.exists():
        check_holder(folder.submissions)


def check_run(paths: RunPaths) -> None:
    """Raise UntrustedError if another user could have written the run's files."""
    check_experiment_folder(paths.siblings)
    if paths.folder.is_symlink():  # moved to another disk
        check_own(paths.folder)
        check_holder(paths.folder.resolve().parent)
    folder = paths.folder.resolve()
    check_own(folder)
    if folder.stat().st_mode & _ENTERABLE:
        for path in _below(folder):
            check_own(path)


def is_trusted(paths: RunPaths) -> bool:
    """Return True if the code that the run names may be executed."""
    try:
        check_run(paths)
    except (OSError, UntrustedError):
        return False
    return True


def check_own(path: Path) -> None:
    """Raise UntrustedError if ``path`` belongs to another user or others may write it."""
    seen = path.lstat()
    _check_owner(path, seen)
    if seen.st_mode & _WRITABLE and not stat.S_ISLNK(seen.st_mode):
        raise UntrustedError(_writable(path, "go-w"))


def check_holder(folder: Path) -> None:
    """Raise UntrustedError if other users can replace files in ``folder``."""
    _check_owner(folder, folder.lstat())
    seen = folder.stat()
    _check_owner(folder, seen)
    if seen.st_mode & _WRITABLE and not seen.st_mode & stat.S_ISVTX:
        raise UntrustedError(_writable(folder, "go-w"))


def _check_owner(path: Path, seen: os.stat_result) -> None:
    if seen.st_uid not in {0, os.geteuid()}:
        raise UntrustedError(
            f"{path}: belongs to another user (uid {seen.st_uid}), so it is not trusted; use your own "
            "folder: set HPC_TRAIN_RUNS, or give the experiment another name"
        )


def _writable(path: Path, mode: str) -> str:
    return (
        f"{path}: group or others may write it, so it is not trusted; check what is in it, then run "
        f"`chmod {mode} {shlex.quote(str(path))}`"
    )


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if os.path.lexists(path):
                yield path
