"""Errors of the operating system: temporary or permanent, retries of a write, messages to the user.

The same rules for everything that a rank or a command reads and writes. A message names the path, its owner
or the limit that is the cause, if it could be determined.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from traceback import extract_tb
from typing import TypeVar

from hpc_train.errors import StorageError, TransientStorageError
from hpc_train.run.files import UnreadableFileError
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.resource_limits import reached_limits

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

#: Errors of the file system for every node: retrying elsewhere does not help.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def retried(
    work: Callable[[], Result], path: Path, *, transient: Collection[int] = TRANSIENT, tells: bool = True
) -> Result:
    """Run ``work``, which must be repeatable, and retry on temporary errors at ``path``.

    Blocks for the pauses between retries. Raises the last OSError, and permanent errors at once. ``tells``:
    whether to log a warning for each retry.
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
    """Raise StorageError or TransientStorageError, naming ``path``, if opening or using it fails."""
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
    """Return the message for an operating system error at ``path``, unless ``error`` names another path."""
    if error.errno in TRANSIENT:
        return TransientStorageError(f"{path}: {_reason(error)}")
    limits = reached_limits(error)
    remedy = limits or f"{_remedy(error, path) or '; fix it there'}, then continue"
    return StorageError(f"{path}: {_reason(error)}{remedy}")


def error_words(error: OSError, path: Path | None = None) -> str:
    """Return an operating system error in one line: its path, the cause, the limit and the remedy.

    ``path``: the path in use, if ``error`` has none. Without either, the message names the line of code, and
    the places that are full or read-only. Causes are looked up, never assumed.
    """
    named = path or _path_of(error)
    if named is None:
        text = f"input/output: {error.strerror or error} ({place_of(error)}){_unnamed_remedy(error)}"
    else:
        text = f"{named}: {_reason(error)}{_remedy(error, named)}"
    return f"{text}{reached_limits(error)}"


def error_clauses(error: BaseException | None) -> str:
    """Return clauses for a traceback's end: the refused path's owner, the reached limit; may be empty."""
    refused = error
    while refused is not None:
        if isinstance(refused, PermissionError) and (path := _path_of(refused)) is not None:
            return f"; {_owner_words(path)}"
        refused = refused.__cause__ or refused.__context__
    return reached_limits(error)


def _path_of(error: OSError) -> Path | None:
    return Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    reason = _REASONS.get(error.errno or 0, text)
    return reason if text.lower() in reason.lower() else f"{reason} ({text})"


def place_of(error: BaseException) -> str:
    """Return the line of code that raised ``error``, as ``file.py:12``."""
    frames = extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


def _remedy(error: OSError, path: Path) -> str:
    """Return the remedy for ``error`` at ``path``, beginning with ``; ``; empty if it is unknown."""
    if error.errno == errno.ENOSPC:
        used = _used_up(path)
        return f"; {used}free some space there"
    if error.errno == errno.EDQUOT:
        return "; free some space there, or ask for a larger quota (`quota -s` shows it)"
    if error.errno == errno.EROFS:
        return "; have it mounted writable, or use another folder"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"; {_owner_words(path)}"
    return ""


def _used_up(path: Path) -> str:
    """Return a clause if the file system of ``path`` has space, as ``df`` shows, but no inodes left."""
    with suppress(OSError):
        usage = os.statvfs(_existing(path))
        if usage.f_bavail > 0 and usage.f_files and usage.f_favail == 0:
            return "it has space but no inodes left (`df -i`): remove files, or "
    return ""


def _owner_words(path: Path) -> str:
    there, is_forbidden = _refusing(path)
    try:
        status = there.stat()
    except OSError as error:
        return f"{there} can't be examined: {error.strerror}"
    what = "it" if there == path else f"its folder {there}"
    owner, me = _user_name(status.st_uid), _user_name(os.geteuid())
    facts = (
        f"{what} belongs to {owner} and has mode {S_IMODE(status.st_mode):04o}, and this process runs as {me}"
    )
    if is_forbidden:
        return f"{facts}: use a folder of your own, or have the owner permit it"
    return f"{facts}: the mode permits it, so an access list, a security module or the file server refuses it"


def _refusing(path: Path) -> tuple[Path, bool]:
    """Return the file or folder whose mode decides on access to ``path``, and whether it forbids access."""
    there = _existing(path)
    if there != path:
        return there, not os.access(there, os.W_OK | os.X_OK)
    if not os.access(path, os.R_OK):
        return path, True
    if not os.access(path.parent, os.W_OK | os.X_OK):  # a file is replaced by a new one next to it
        return path.parent, True
    return path, not os.access(path, os.W_OK)


def _existing(path: Path) -> Path:
    for candidate in (path, *path.absolute().parents):
        with suppress(OSError):  # missing, or in a folder that may not be entered
            candidate.lstat()
            return candidate
    return Path("/")


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # in a container
        return f"user {number}"


def _unnamed_remedy(error: OSError) -> str:
    """Return the place that is full or read-only among those that every process writes; empty if none is."""
    places = [str(place) for place in _usual_places() if _is_cause(error, place)]
    if not places:
        return ""
    full = error.errno == errno.ENOSPC
    return f"; {', '.join(places)}: {'full, free some space there' if full else 'read-only'}"


def _usual_places() -> list[Path]:
    folders = [Path.cwd(), Path(os.environ.get("TMPDIR") or "/tmp"), Path("/dev/shm")]
    run = os.environ.get(FOLDER_VARIABLE)
    return list(dict.fromkeys([*([Path(run)] if run else []), *folders]))


def _is_cause(error: OSError, place: Path) -> bool:
    with suppress(OSError):
        usage = os.statvfs(place)
        if error.errno == errno.ENOSPC:
            return usage.f_bavail == 0
        if error.errno == errno.EROFS:
            return bool(usage.f_flag & os.ST_RDONLY)
    return False
