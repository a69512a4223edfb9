"""Whether this node's shared memory can be used, and how large it is.

Semaphores and shared tensors of torch, and NCCL's buffers between the GPUs of a node, are files in /dev/shm.
Called by the node check, and before loader processes start.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
from contextlib import suppress

FOLDER = "/dev/shm"


def refusal() -> str | None:
    """Return why nothing can be created in /dev/shm; None if it can be used."""
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
        found = os.statvfs(FOLDER)
        total, free = (blocks * found.f_frsize / 2**20 for blocks in (found.f_blocks, found.f_bavail))
        return f"{total:.0f} MiB, of which {free:.0f} MiB are free"
    return "missing"


def total_bytes() -> int | None:
    """Return the size of /dev/shm; None if it is missing."""
    with suppress(OSError):
        found = os.statvfs(FOLDER)
        return found.f_blocks * found.f_frsize
    return None
