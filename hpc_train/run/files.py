"""Small files that are always complete: written to a temporary file, then renamed; and the only way to read
them, and to open a file that grows in place.

Anyone who can write to a run folder may have replaced a file: reading is bounded, opening never waits for a
pipe, and a file of the wrong shape is unreadable.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from hpc_train.run.file_shapes import fits

#: On NFS, a file that another node replaces while it is read is stale; the next read finds the new one.
_STALE_READS = 3
#: A link to itself; a socket, or a pipe without a reader; a folder opened for writing.
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}
_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "wb": os.O_WRONLY | os.O_TRUNC | os.O_CREAT,
}
#: Larger than any small file of a run with thousands of ranks.
MAX_SMALL_BYTES = 64 << 20
#: Characters of a path of somebody else's archive.
_MAX_PATH = 1024
#: Measured (ext4): beyond eight, threads that wait for fsync gain nothing.
_WRITERS = 8

#: Errors of a file system that lacks a call: vfat, CIFS, FUSE and object-store mounts.
_UNSUPPORTED = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


class UnreadableFileError(ValueError):
    """The path does not contain one of our files."""


def is_plain_path(path: str) -> bool:
    """Return True if the path leads to a file or folder below the folder that it is joined to."""
    parts = path.split("/")
    return len(path) <= _MAX_PATH and "\0" not in path and not {"", ".", ".."}.intersection(parts)


def hidden_beside(path: Path) -> Path:
    """Return a new hidden name in the folder of ``path``, for a file before or after its time as ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` atomically when the block ends without an error.

    With ``sync`` it is on disk then. An OSError names ``path``, also for a failed write, which names no file.
    """
    temporary = hidden_beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            if sync:
                file.flush()
                sync_file(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    if sync:
        sync_folder(path.parent)


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace ``path`` by ``text`` atomically; with ``sync`` it is on disk when this returns."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode())


def write_json(path: Path, data: dict[str, Any], *, sync: bool = False) -> None:
    """Replace ``path`` by ``data`` as JSON atomically."""
    write_text(path, json_text(data), sync=sync)


def write_new(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a file into a folder that other processes can't see yet, and that is renamed once it is complete.

    With ``sync`` its content is on disk when this returns; the caller syncs the folder.
    """
    with path.open("wb") as file:
        file.write(text.encode())
        if sync:
            file.flush()
            sync_file(file.fileno())


def json_text(data: dict[str, Any]) -> str:
    """Return ``data`` as the text of one of our files."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``; None if it is missing, or does not fit ``file_shapes.SHAPES``."""
    try:
        data = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and fits(data, path.name) else None


def read_text(path: Path, max_bytes: int = MAX_SMALL_BYTES, *, errors: str = "strict") -> str:
    """Return the text of a small file.

    Raises UnreadableFileError if it is too large or not a regular file, UnicodeDecodeError with ``errors``
    ``strict``, OSError for errors of the disk.
    """
    for _ in range(_STALE_READS):
        try:
            return read_regular(path, max_bytes).decode("utf-8", errors)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read_regular(path, max_bytes).decode("utf-8", errors)


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """Return a file's content. Raises OSError; UnreadableFileError if it is larger, or no regular file."""
    descriptor, size = _open(path)
    try:
        # Content added since is not read.
        if size > max_bytes:
            raise UnreadableFileError(f"{path}: larger than {max_bytes} bytes")
        parts = []
        while size > 0 and (part := os.read(descriptor, size)):
            parts.append(part)
            size -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def read_tail(path: Path, max_bytes: int) -> tuple[bytes, bool]:
    """Return at most the last ``max_bytes`` of a file, and whether that is all. Raises as ``_open``."""
    descriptor, size = _open(path)
    try:
        return os.pread(descriptor, max_bytes, max(0, size - max_bytes)), size <= max_bytes
    finally:
        os.close(descriptor)


def tail_text(path: Path, max_bytes: int) -> str:
    """Return the text in the last ``max_bytes``; empty if it is not a regular file. Raises OSError."""
    try:
        return read_tail(path, max_bytes)[0].decode("utf-8", "replace")
    except UnreadableFileError:
        return ""


def open_regular(path: Path, mode: Literal["rb", "ab", "wb"] = "rb") -> BinaryIO:
    """Open a file with buffered writes. Raises like ``open_descriptor``."""
    return os.fdopen(open_descriptor(path, _FLAGS[mode]), mode)


def open_descriptor(path: Path, flags: int) -> int:
    """Return the descriptor of a file opened with ``flags`` (``os.O_…``).

    Raises UnreadableFileError for a folder, pipe or device, which could block, and for a link to itself.
    """
    descriptor, _ = _open(path, flags)
    os.set_blocking(descriptor, True)  # a process that inherits it expects that
    return descriptor


def _open(path: Path | str, flags: int = os.O_RDONLY) -> tuple[int, int]:
    """Return a descriptor and the file's size in bytes."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise UnreadableFileError(f"{path}: {error.strerror}") from error
        raise
    seen = os.fstat(descriptor)
    if not stat.S_ISREG(seen.st_mode):
        os.close(descriptor)
        raise UnreadableFileError(f"{path}: not a regular file")
    return descriptor, seen.st_size


def sync_folder(folder: Path) -> None:
    """Sync the folder's own entries (a rename, a new file) to disk; see ``sync_file``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_file(descriptor: int) -> None:
    """Sync an open file or folder to disk. A file system without fsync is reported once."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_unsupported(error):
            raise
        report_unsupported("fsync", "after a power failure the newest files may be incomplete")


def free_space(folder: Path) -> int | None:
    """Return the free bytes of a file system; None if it does not report them, as with some object stores."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        if not is_unsupported(error):
            raise
        return None
    return usage.free if usage.total else None


def is_unsupported(error: OSError) -> bool:
    """Return True if ``error`` means that the file system does not support the call that failed."""
    return error.errno in _UNSUPPORTED


@cache
def report_unsupported(call: str, consequence: str) -> None:
    """Log once per process that a file system lacks a call that the run can do without."""
    _log.warning("the file system of the runs folder has no %s: %s", call, consequence)


def create_folder(
    target: Path, fill: Callable[[Path], None], *, mode: int = 0o777, syncs_parent: bool = True
) -> bool:
    """Create a folder atomically; ``fill`` writes its content into the folder that it receives.

    False if another process has created ``target`` meanwhile; an empty folder there is replaced.
    ``syncs_parent``: False if the caller syncs it, once for several folders.
    """
    temporary = hidden_beside(target)
    temporary.mkdir(mode=mode)
    try:
        fill(temporary)
        temporary.rename(target)
    except OSError:
        if not (target.is_dir() and any(target.iterdir())):
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if syncs_parent:
        sync_folder(target.parent)
    return True


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return ``work`` of each item by a few threads; after an error, which is raised, none is begun."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        return list(pool.map(work, items))


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically; a missing one is fine."""
    aside = hidden_beside(folder)
    with suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
