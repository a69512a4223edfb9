"""Real file systems that are small enough to fill."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def take_room(ballast: Path, leave_bytes: int) -> bool:
    """Take what there is beyond ``leave_bytes``; tell whether nothing was left to take.

    A small file of somebody else's may be in the way, or just have been replaced.
    """
    with ballast.open("ab") as file:
        if (more_bytes := shutil.disk_usage(ballast.parent).free - leave_bytes) <= 0:
            return True
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more_bytes)
    return False


@contextmanager
def small_disk(place: Path, size: str, leave_out: Callable[[str], object] = pytest.skip) -> Iterator[Path]:
    """Mount a file system of ``size``; ``leave_out`` ends the test where that is not permitted."""
    place.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        why = mounted.stderr.strip() if mounted.returncode else None
    except FileNotFoundError as error:
        why = str(error)
    if why is not None:
        leave_out(f"mounting a small file system is not permitted: {why}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def on_small_disk(folder: Path, size: str) -> Iterator[None]:
    """Move a folder to a file system of ``size`` that is mounted in its place; it is empty afterwards."""
    mode, content = folder.stat().st_mode, Path(tempfile.mkdtemp(prefix="hpc-train-moved-"))
    shutil.copytree(folder, content, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(folder)
    with small_disk(folder, size):
        folder.chmod(stat.S_IMODE(mode))
        shutil.copytree(content, folder, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(content)
        yield


class SyncedFiles:
    """Records the files that this process syncs and those synced before each rename of a file or folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inodes: set[int] = set()
        self._renames: dict[Path, set[int]] = {}
        fsync, rename = os.fsync, Path.rename

        def noting_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self._inodes.add(os.fstat(descriptor).st_ino)

        def noting_rename(path: Path, target: Path) -> Path:
            self._renames[Path(target)] = set(self._inodes)
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(Path, "rename", noting_rename)

    def at_rename_to(self, target: Path) -> set[int]:
        """Return the inodes of the files that had been synced when something was renamed to ``target``."""
        return self._renames[target]
