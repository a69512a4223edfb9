"""Identity of files by content, for caches and fingerprints of data.

A list of samples (``.csv``, ``.json``, …) is read whole, up to 1 GiB. For other files evenly spaced blocks
are read, including the first and the last, and for many files an even sample. At most ``MOST_FILES`` files
are opened, so the cost is bounded. A change elsewhere, with the same size, does not change the digest.

A cache is named by this content *and* by the resolved location of the files (``resolved``); the fingerprint
of a run by the content alone, because the path of the same data differs between machines.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

import xxhash

#: Each costs one or two requests to a file server: 256 take half a second at 2 ms per request (assumed).
MOST_FILES = 256
#: Blocks of a sampled file, such as an image: it is read whole up to their sum.
_SAMPLE = 4, 4096
#: Blocks of all lists together, and of all other listed files (tar shards, Arrow files, raw tokens).
_LISTS, _OTHERS = (1024, 1 << 20), (256, 1 << 16)
_LIST_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
#: A file that changed recently may change again within the same tick of its file system's clock.
SETTLED_NS = 3_000_000_000

_Item = TypeVar("_Item")


class EvenSample(Generic[_Item]):
    """Every k-th item of a stream of unknown length: all of up to ``MOST_FILES``, else at least half as many.

    k is a power of 2 that doubles whenever too many items are kept, so the sample depends only on the stream.
    """

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self.kept: list[_Item] = []
        self._stride, self._count = 1, 0
        for item in items:
            self.add(item)

    def add(self, item: _Item) -> None:
        """Append an item to the stream."""
        if self._count % self._stride == 0:
            self.kept.append(item)
            if len(self.kept) > MOST_FILES:
                self.kept = self.kept[::2]
                self._stride *= 2
        self._count += 1


def resolved(paths: Sequence[Path]) -> list[str]:
    """Return the absolute paths of files, with links to their folders resolved."""
    folders = {folder: os.path.realpath(folder) for folder in {path.parent for path in paths}}
    return [f"{folders[path.parent]}/{path.name}" for path in paths]


def block_digest(path: Path, blocks: int, block_bytes: int) -> str:
    """Return a digest of the file's size and of its content, whole up to ``blocks * block_bytes`` bytes.

    Raises OSError, also for a pipe or a device, which could block or never end.
    """
    digest = xxhash.xxh3_128()
    with _open(path, block_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d\0" % size)
        if size <= blocks * block_bytes:
            while block := file.read(block_bytes):
                digest.update(block)
            return digest.hexdigest()
        for block_number in range(blocks):
            file.seek((size - block_bytes) * block_number // (blocks - 1))
            digest.update(file.read(block_bytes))
    return digest.hexdigest()


def sample_digest(root: str, names: Iterable[str]) -> str:
    """Return a digest of the files with these names (an even sample) below ``root``. Raises OSError."""
    digest = xxhash.xxh3_128()
    for name in names:
        digest.update(os.fsencode(name) + b"\0")
        digest.update(block_digest(Path(root, name), *_SAMPLE).encode())
    return digest.hexdigest()


def files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the names, sizes and content of files that are the data or list them, in order.

    Cached as long as the files' status is unchanged. Raises OSError.
    """
    files = tuple(_FileStatus.of(path) for path in paths)
    newest_ns = max((file.ctime_ns for file in files), default=0)
    is_settled = newest_ns < time.time_ns() - SETTLED_NS
    return (_files_digest if is_settled else _files_digest.__wrapped__)(files)


class _FileStatus(NamedTuple):
    path: Path
    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> _FileStatus:
        status = path.stat()
        return cls(path.absolute(), status.st_ino, status.st_size, status.st_ctime_ns)


@lru_cache(maxsize=64)
def _files_digest(files: tuple[_FileStatus, ...]) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(os.fsencode(file.path.name) + b"\0%d\0" % file.size)
    lists: list[Path] = []
    others: list[Path] = []
    for file in files:
        (lists if file.path.suffix in _LIST_SUFFIXES else others).append(file.path)
    for paths, (blocks, block_bytes) in ((lists, _LISTS), (others, _OTHERS)):
        sample = EvenSample(paths).kept
        for path in sample:
            digest.update(block_digest(path, max(2, blocks // len(sample)), block_bytes).encode())
    return digest.hexdigest()


def _open(path: Path, buffer_bytes: int) -> BinaryIO:
    """Return an open regular file. Raises OSError for anything else.

    ``buffer_bytes``: Python's default is the block size of the file system, 4 MiB on Lustre.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb", buffering=buffer_bytes)
