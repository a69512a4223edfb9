"""Copies a pack to a disk of this node, once for all jobs of a user; called by ``training.data_staging``.

    <folder>/hpc-train-<uid>/<hash of the pack's header>/<name of the pack>

The copy is written as ``.<name>.partial`` under a lock, synced and renamed. A lock ends with its process, so
the partial file of a killed process is written again by the next one. The folder is private to the user,
because other users may write to a node's temporary folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.datasets.packed import DamagedPackError, Pack
from hpc_train.run.files import UnreadableFileError, free_space, open_descriptor, sync_file, sync_folder
from hpc_train.run.trust import UntrustedError, check_own

#: Small, so that a stop signal, which Python handles between two reads, is handled soon (assumed).
_CHUNK_BYTES = 8 << 20
#: Synced at this interval, so that progress is that of the disk and the sync at the end is short.
_SYNC_BYTES = 1 << 30
#: Space to leave free on the node's disk (assumed).
_SPARE_BYTES = 256 << 20
_POLL_S = 0.2


class NoCopyError(Exception):
    """There is no copy; the text is the reason, in a form that follows a colon."""


@dataclass(frozen=True)
class PackCopy:
    """The location of a pack's copy, which may not exist yet."""

    source: Pack
    folder: Path

    @property
    def path(self) -> Path:
        """The finished copy; it has the pack's file name."""
        return self.folder / self.source.path.name

    @property
    def _partial(self) -> Path:
        return self.folder / f".{self.source.path.name}.partial"

    @property
    def is_complete(self) -> bool:
        """True if the copy exists, with the size and the header of the pack."""
        try:
            pack = Pack(self.path)
        except (OSError, DamagedPackError):
            return False
        return (pack.digest, pack.nbytes) == (self.source.digest, self.source.nbytes)

    @property
    def copied(self) -> float:
        """The fraction of the pack, 0…1, that has been copied, by any process."""
        with suppress(OSError):
            return min(1.0, self._partial.stat().st_size / self.source.nbytes)
        return 0.0

    def make(self, report: Callable[[float], None]) -> None:
        """Copy the pack unless it has been copied; wait if another process copies it. Raises NoCopyError.

        ``report`` receives the fraction copied so far, also while another process copies.
        """
        try:
            self._make_folder()
            with self._locked(report):
                if not self.is_complete:
                    self._check_room()
                    self._copy(report)
        except (UntrustedError, UnreadableFileError) as error:
            raise NoCopyError(str(error)) from error
        except OSError as error:
            raise NoCopyError(f"{error.filename or self.folder}: {error.strerror or error}") from error

    def _make_folder(self) -> None:
        user_folder = self.folder.parent
        if not user_folder.parent.is_dir():
            raise NoCopyError(f"{user_folder.parent} is not a folder on this node")
        user_folder.mkdir(mode=0o700, exist_ok=True)
        check_own(user_folder)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def _locked(self, report: Callable[[float], None]) -> Iterator[None]:
        lock = open_descriptor(self.folder / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    report(self.copied)
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    def _check_room(self) -> None:
        self._partial.unlink(missing_ok=True)
        free = free_space(self.folder)
        needed = self.source.nbytes + _SPARE_BYTES
        if free is not None and free < needed:
            raise NoCopyError(
                f"{self.folder} has too little room: {needed} bytes are needed, {free} are free"
            )

    def _copy(self, report: Callable[[float], None]) -> None:
        nbytes, offset = self.source.nbytes, 0
        try:
            with self._partial.open("xb", buffering=0) as out:
                while offset < nbytes:
                    chunk = self.source.read(offset, min(_CHUNK_BYTES, nbytes - offset))
                    if not chunk:
                        raise OSError(errno.EIO, "the pack became shorter while it was copied")
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[out.write(rest) :]
                    offset += len(chunk)
                    if offset % _SYNC_BYTES < len(chunk):
                        os.fdatasync(out.fileno())
                    report(offset / nbytes)
                sync_file(out.fileno())
            self._partial.rename(self.path)
        except OSError:
            self._partial.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)


def copy_of(source: Pack, folder: Path) -> PackCopy:
    """Return the location of a pack's copy below ``folder``, a folder of this node."""
    return PackCopy(source, folder / f"hpc-train-{os.geteuid()}" / source.digest.hex())
