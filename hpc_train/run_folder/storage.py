"""Errors of disks and file servers: which may pass, how often a write is tried again, what the user reads.

One rule for everything that a rank writes; ``engine`` and ``run_folder`` use it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from hpc_train.errors import StorageError, TransientStorageError

#: Before each further try of what a file server refused (assumed).
RETRY_AFTER_S = (0.5, 2.0)

#: Of Linux alone.
_EREMOTEIO = getattr(errno, "EREMOTEIO", errno.EIO)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    _EREMOTEIO: "the file server reports an I/O error",
    errno.EIO: "the disk reports an I/O error",
    errno.ESTALE: "the file server has forgotten the file (stale file handle)",
    errno.ETIMEDOUT: "the file server does not answer",
}
#: What may pass, or is the node's and not the file system's.
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, _EREMOTEIO})

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def retried(
    work: Callable[[], Result],
    path: Path,
    *,
    transient: Collection[int] = TRANSIENT,
    tells: bool = True,
) -> Result:
    """Do ``work``, which may be repeated, again where it meets a transient error at ``path``.

    Blocks for the pauses between tries. Raises the last OSError, or at once one that does not pass.
    ``tells``: warns of each further try.
    """
    for pause_s in RETRY_AFTER_S:
        try:
            return work()
        except OSError as error:
            if error.errno not in transient:
                raise
            if tells:
                _log.warning("%s: %s; tried again", path, error.strerror)
            time.sleep(pause_s)
    return work()


def storage_error(error: OSError, path: Path) -> StorageError | TransientStorageError:
    """Return what is told of an operating system's refusal to write at ``path``."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    if error.errno in TRANSIENT:
        return TransientStorageError(f"{path}: {reason}")
    return StorageError(f"{path}: {reason}; make room or mend it there, then go on")
