"""A file of records that one attempt appends to and syncs before each checkpoint: metric rows, digests."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpc_train.run.files import UnreadableFileError, open_descriptor, open_regular, replacing, sync_file
from hpc_train.run.storage_errors import named_errors, replaced_file, retried

_COPIED_BYTES = 1 << 20


class GrowingFile(ABC):
    """The records that an earlier attempt wrote and this one keeps, followed by this attempt's records.

    The file is replaced once at the start, so that an earlier attempt that still runs can't write to it. Only
    the records since the last ``sync`` are in memory, to be written again if an fsync fails. Methods raise
    StorageError or TransientStorageError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Training appends while the saving thread syncs.
        self._lock = threading.Lock()
        self._unsynced: list[bytes] = []
        with named_errors(path):
            retried(self._begin, path)
            facts = path.stat()
        self._inode, self._end = facts.st_ino, facts.st_size
        self._descriptor: int | None = None

    @abstractmethod
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        """Copy the records to keep into the empty file ``new``. Called once, if there is an old file."""

    def _begin(self) -> None:
        with (
            replacing(self._path, sync=True) as new,
            suppress(FileNotFoundError),
            open_regular(self._path) as old,
        ):
            self.copy_kept(old, new)

    def write(self, record: bytes) -> None:
        """Write a record to the operating system, so that it survives a crash of this process."""
        with self._lock, named_errors(self._path):
            retried(lambda: self._write(record), self._path)
            self._unsynced.append(record)

    def _write(self, record: bytes) -> None:
        """Write a record after the last one, over any partial record from a failed try."""
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        try:
            done = 0
            while done < len(record):
                done += os.pwrite(self._descriptor, record[done:], self._end + done)
        except OSError:
            self._close()  # a stale handle stays stale
            raise
        self._end += len(record)

    def _open(self) -> None:
        self._descriptor = open_descriptor(self._path, os.O_WRONLY)
        if os.fstat(self._descriptor).st_ino != self._inode:
            self._close()
            raise OSError(errno.EEXIST, "another attempt has replaced the file", str(self._path))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def sync(self) -> None:
        """Sync all records to the disk, before a checkpoint that relies on them. Any thread.

        Raises OSError, to which the save adds a path, or StorageError.
        """
        work = [self._sync]

        def once() -> None:
            work.pop()() if work else self._write_again()

        try:
            retried(once, self._path)
        except UnreadableFileError as error:
            raise replaced_file(error) from error

    def _sync(self) -> None:
        with self._lock:
            count = len(self._unsynced)
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            descriptor = os.dup(self._descriptor)  # training may close the original meanwhile
        try:
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            del self._unsynced[:count]

    def _write_again(self) -> None:
        """Replace the file: after a failed fsync, the next fsync of the same file reports success."""
        with self._lock:
            self._close()
            self._open()  # raises if another attempt owns the file
            unsynced = b"".join(self._unsynced)
            with replacing(self._path, sync=True) as new:
                with open_regular(self._path) as old:
                    copy(old, self._end - len(unsynced), new)
                new.write(unsynced)
            self._close()
            self._unsynced.clear()
            self._inode = self._path.stat().st_ino

    @property
    def is_replaced(self) -> bool:
        """True if another attempt has replaced the file, which belongs to that attempt."""
        return self._path.stat().st_ino != self._inode

    def close(self) -> None:
        """Close the file without syncing it; a later ``write`` opens it again."""
        self._close()


def copy(old: BinaryIO, size: int, new: BinaryIO) -> None:
    """Copy ``size`` bytes, or up to the end of ``old``."""
    while size > 0 and (block := old.read(min(size, _COPIED_BYTES))):
        size -= len(block)
        new.write(block)
