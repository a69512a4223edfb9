"""Availability and size of this node's shared memory.

Torch's semaphores and shared tensors, and NCCL's buffers between the GPUs of a node, are files in /dev/shm.
Called by the node check, and before loader processes start.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
from contextlib import suppress

FOLDER = "/dev/shm"


def refusal() -> str | None:
    """Return the reason why nothing can be created in /dev/shm; None if it can be used."""
    try:
        multiprocessing.get_context("fork").Lock()  # a POSIX semaphore: a file of 32 bytes
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            reason = f"{reason} ({sizes()})"
        elif not os.path.isdir(FOLDER):  # noqa: PTH112  (no path is computed)
            reason = "the folder does not exist"
        return f"{FOLDER} (shared memory) can't be used: {reason}"
    return None


def sizes() -> str:
    """Return the size of /dev/shm and its free part, as ``64 MiB, of which 3 MiB are free``."""
    with suppress(OSError):
        stats = os.statvfs(FOLDER)
        total, free = (blocks * stats.f_frsize / 2**20 for blocks in (stats.f_blocks, stats.f_bavail))
        return f"{total:.0f} MiB, of which {free:.0f} MiB are free"
    return "missing"


def total_bytes() -> int | None:
    """Return the size of /dev/shm; None if it is missing."""
    with suppress(OSError):
        stats = os.statvfs(FOLDER)
        return stats.f_blocks * stats.f_frsize
    return None
