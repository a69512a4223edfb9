"""Before a rank reads data: copies the pack of ``data.cache`` to the node's local disk if ``data.stage`` is
set, and compares files with their hashes, if the data set has any (``DataSource.verify``).

The first rank of a node does both and writes the outcome into the attempt's folder; the others wait for it.
All ranks report progress in the same hundred parts, so that the watchdog can name a rank that hangs.

A pack is copied once for all jobs of a user, to
``<folder>/hpc-train-<uid>/<hash of the pack's header>/<name of the pack>``: written as ``.<name>.partial``
under a lock, synced and renamed. A lock ends with its process, so the partial file of a killed process is
written again by the next one. The folder is private to the user, because other users may write to a node's
temporary folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import expanded
from hpc_train.run import files
from hpc_train.run.trust import UntrustedError, check_own
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.packed import DamagedPackError, Pack, find_pack
from hpc_train.training.datasets.token_check import CHECK_LIMIT_S
from hpc_train.training.health.progress import Progress
from hpc_train.training.rank import Rank

#: The folders of ``data.stage: true``: the job's, else the node's.
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
#: Small, so that a stop signal, which Python handles between two reads, is handled soon (assumed).
_CHUNK_BYTES = 8 << 20
#: Synced at this interval, so that progress is that of the disk and the sync at the end is short.
_SYNC_BYTES = 1 << 30
#: Space to leave free on the node's disk (assumed).
_SPARE_BYTES = 256 << 20
_POLL_S = 0.2
_PHASE, _PARTS = "staging data", 100
_log = logging.getLogger(__name__)


def staged(rank: Rank) -> DataConfig:
    """Return the ``data`` section with the copy in place of ``data.cache``, if the file requests one.

    Returns it unchanged, after one warning per node, if no copy is possible: the run is the same, only
    slower.
    """
    data = rank.experiment.data
    if data.cache is None or data.stage is False:
        return data
    progress = _Parts(rank.progress)
    try:
        copy = copy_of(find_pack(data), stage_folder(data.stage))
        if rank.facts.local_rank == 0:
            has_copy = _make(rank, copy, progress)
        else:
            file = rank.paths.attempt(rank.attempt).staging(rank.node)
            has_copy = _outcome(file, progress, lambda: copy.copied).get("has_copy") is True
    except NoCopyError as error:  # the same on all ranks of the node
        has_copy = _warn(rank, error)
    progress.at(1.0)
    return data.model_copy(update={"cache": str(copy.folder)}) if has_copy else data


def verified(rank: Rank, source: DataSource) -> DataSource:
    """Return the source once the first rank of this node has verified its files.

    Raises BadFileError for damaged files, on all ranks of the node.
    """
    if source.verify is None:
        return source
    progress = _Parts(rank.progress)
    file = rank.paths.attempt(rank.attempt).staging(f"{rank.node}-verified")
    if rank.facts.local_rank == 0:
        try:
            source.verify(progress.at)
        except BadFileError as error:
            files.write_json(file, {"version": 1, "problem": str(error)})
            raise
        files.write_json(file, {"version": 1, "problem": None})
    else:
        begin = time.monotonic()
        outcome = _outcome(file, progress, lambda: min(1.0, (time.monotonic() - begin) / CHECK_LIMIT_S))
        if outcome.get("problem") is not None:
            raise BadFileError(str(outcome["problem"]))
    progress.at(1.0)
    return source


def _outcome(file: Path, progress: _Parts, fraction: Callable[[], float]) -> dict[str, Any]:
    """Wait for what the first rank of the node writes, and report the fraction done meanwhile."""
    while (outcome := files.read_json(file)) is None:
        progress.at(fraction())
        time.sleep(_POLL_S)
    return outcome


def stage_folder(stage: str | bool) -> Path:
    """Return the folder of this node. Raises NoCopyError if the file and the environment name none."""
    if isinstance(stage, str):
        path = os.path.expandvars(expanded(stage))
        if "$" in path:
            raise NoCopyError(f"{stage} has a variable that is not set on this node")
        return Path(path)
    folder = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    if folder is None:
        raise NoCopyError(f"neither {' nor '.join(f'${name}' for name in _VARIABLES)} is set; write a folder")
    return Path(folder)


def _make(rank: Rank, copy: PackCopy, progress: _Parts) -> bool:
    """Copy, and report the outcome to the other ranks of the node."""
    was_there = copy.is_complete
    try:
        copy.make(progress.at)
        has_copy = True
        _log.info("data.stage: %s %s", copy.path, "is there already" if was_there else "has been copied")
    except NoCopyError as error:
        has_copy = _warn(rank, error)
    files.write_json(
        rank.paths.attempt(rank.attempt).staging(rank.node), {"version": 1, "has_copy": has_copy}
    )
    return has_copy


def _warn(rank: Rank, error: NoCopyError) -> bool:
    if rank.facts.local_rank == 0:
        _log.warning("data.stage: the pack is read where it is, in data.cache, from %s: %s", rank.node, error)
    return False


class _Parts:
    """Reports a fraction as parts of a phase: every part in order, on every rank."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._part = 0
        progress.at(_PHASE)

    def at(self, fraction: float) -> None:
        """Report the parts up to this fraction, 0…1."""
        while self._part < int(fraction * _PARTS):
            self._part += 1
            self._progress.at(_PHASE, part=self._part)


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
        except (UntrustedError, files.UnreadableFileError) as error:
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
        lock = files.open_descriptor(self.folder / ".lock", os.O_RDWR | os.O_CREAT)
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
        free = files.free_space(self.folder)
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
                files.sync_file(out.fileno())
            self._partial.rename(self.path)
        except OSError:
            self._partial.unlink(missing_ok=True)
            raise
        files.sync_folder(self.folder)


def copy_of(source: Pack, folder: Path) -> PackCopy:
    """Return the location of a pack's copy below ``folder``, a folder of this node."""
    return PackCopy(source, folder / f"hpc-train-{os.geteuid()}" / source.digest.hex())
