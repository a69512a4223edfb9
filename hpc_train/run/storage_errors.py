"""Errors of disks and file servers: which may be temporary, how often a write is retried, what the user
reads.

The same rules for everything that a rank writes.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hpc_train.errors import StorageError, TransientStorageError
from hpc_train.run import resource_limits
from hpc_train.run.files import UnreadableFileError

#: Pauses before each retry (assumed).
RETRY_AFTER_S = (0.5, 2.0)

#: On Linux only.
_EREMOTEIO = getattr(errno, "EREMOTEIO", errno.EIO)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    _EREMOTEIO: "the file server reports an I/O error",
    errno.EFBIG: "the file would be larger than this process may write",
    errno.EIO: "the disk reports an I/O error",
    errno.ESTALE: "the file server has forgotten the file (stale file handle)",
    errno.ETIMEDOUT: "the file server does not answer",
}
#: Errors that may be temporary, or are the node's and not the file system's.
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, _EREMOTEIO})

#: Errors of the file system for every node: trying again elsewhere does not help.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def retried(
    work: Callable[[], Result],
    path: Path,
    *,
    transient: Collection[int] = TRANSIENT,
    tells: bool = True,
) -> Result:
    """Run ``work``, which must be repeatable, and retry on temporary errors at ``path``.

    Blocks for the pauses between retries. Raises the last OSError, and permanent errors at once. ``tells``:
    log a warning for each retry.
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


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raise StorageError or TransientStorageError, naming ``path``, where opening or using it fails."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error
    except UnreadableFileError as error:
        raise replaced_file(error) from error


def replaced_file(error: UnreadableFileError) -> StorageError:
    """Return the message for a pipe, a folder or a device in the place of a file of the run."""
    return StorageError(f"{error}; move it away, then continue")


def storage_error(error: OSError, path: Path) -> StorageError | TransientStorageError:
    """Return the message for an operating system error in writing ``path``."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    if error.errno in TRANSIENT:
        return TransientStorageError(f"{path}: {reason}")
    if error.errno == errno.EFBIG:
        limit = resource_limits.clause(os.strerror(errno.EFBIG), resource_limits.current())
        return StorageError(f"{path}: {reason}{limit}")
    return StorageError(f"{path}: {reason}; free some space or fix it there, then continue")
