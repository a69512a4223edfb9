"""Real file systems that are small enough to fill."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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
