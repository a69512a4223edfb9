"""Writes packs, in ``hpc-train prepare``, in the format of ``datasets.packed``.

A pack is written under a temporary name, synced and renamed, so two concurrent ``prepare`` are safe: each
writes its own, and the last rename wins.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import xxhash

from hpc_train.console import say
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan.input_files import pack_files
from hpc_train.run.files import replacing
from hpc_train.run.storage_errors import storage_error
from hpc_train.training.datasets import packed
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.decoding import as_pixels, decode
from hpc_train.training.datasets.images import PixelRules, image_content

#: Images of at most this side are stored decoded. Measured, with padded crop and flip: 4.0 times the images
#: per CPU second at 32 pixels, 2.6 at 64, 2.0 at 128, for 3, 6 and 9 times the bytes of the JPEG files.
MAX_DECODED_SIDE = 64
#: Files that are read in parallel: a file server answers several requests in the time of one (assumed).
_READERS = 16
_WINDOW = 4 * _READERS
_REPORT_EVERY_S = 30.0
#: A temporary file that has not been written to for this long belongs to a ``prepare`` that was killed.
_LEFT_OVER_S = 24 * 3600.0

Item = TypeVar("Item")
#: Packs that this process has written or checked, because the runs of a sweep share them.
_checked: set[Path] = set()


class ImageFiles(Protocol):
    """A split of image files: ``FolderSplit``."""

    folder: Path
    channels: int
    paths: packed.Array
    classes: packed.Array

    def __len__(self) -> int: ...

    def path(self, index: int) -> Path:
        """Return the file of a sample."""


class _NotAlikeError(Exception):
    """Images can't be stored decoded: they differ in shape or layout, are too large, or one is damaged."""


def ensure(data: DataConfig, make_source: Callable[[], DataSource]) -> None:
    """Write the pack of ``data.root`` below ``data.cache`` unless there is one that is intact and up to date.

    ``make_source`` returns the splits of image files. Reads an existing pack in full, and the size and time
    of change of every image. Raises BadFileError if an image can't be read or the images change meanwhile,
    StorageError if the disk refuses the pack.
    """
    files = pack_files(data)
    source = make_source()  # first, because it reports problems of the folder
    assert files is not None, "the source has images"
    path = _intact(data, files, source)
    if path is None:
        path = _write(data, files, source)
        if pack_files(data) != files:
            path.unlink(missing_ok=True)
            raise BadFileError(
                f"data.root: the images in {data.root} changed while they were packed; run prepare again"
            )
        say(f"data.cache: {path}: {path.stat().st_size} bytes written")
    _checked.add(path)


def _intact(data: DataConfig, files: list[Path], source: DataSource) -> Path | None:
    """Return the pack to use if there is one; None, after printing the reason, if it must be written."""
    for path in files:
        try:
            pack = packed.Pack(path)
            if not packed.may_read(data, pack.parts["train"]):
                continue
            if path in _checked:
                return path
            why = _difference(pack, source)
        except FileNotFoundError:
            continue
        except packed.DamagedPackError as error:
            why = str(error)
        if why is None:
            say(f"data.cache: {path}: intact and up to date")
            return path
        say(f"{why.removesuffix(f'; {packed.REMEDY}')}; writing it again")
        return None
    return None


def _difference(pack: packed.Pack, source: DataSource) -> str | None:
    """Return the difference between the source and the pack. Raises DamagedPackError for a damaged pack."""
    splits = _splits(source)
    if pack.parts.keys() != splits.keys() or pack.class_names != source.info.class_names:
        return f"data.cache: {pack.path} has other splits or classes than {splits['train'].folder.parent}"
    for name, split in splits.items():
        copy = packed.open_split(pack, name, split.folder.parent, split.channels)
        sizes, times = (pack.array(copy.part, array) for array in ("sizes", "times"))
        names = bytes(pack.array(copy.part, "paths"))
        pack.array(copy.part, "path_ends")
        if len(copy) != len(split) or names != b"".join(split.paths.tolist()):
            return f"data.cache: {pack.path} has other images than {split.folder}"
        facts = _in_parallel(lambda index, split=split: split.path(index).stat(), len(split))  # type: ignore[misc]
        changed = [
            index
            for index, seen in enumerate(facts)
            if (seen.st_size, seen.st_ctime_ns) != (int(sizes[index]), int(times[index]))
        ]
        if changed:
            return (
                f"data.cache: {split.path(changed[0])} has changed since it was packed, one of {len(changed)}"
            )
        for _ in _in_parallel(copy.content, len(copy)):
            pass
    return None


def _in_parallel(work: Callable[[int], Item], count: int) -> Iterator[Item]:
    """Yield ``work`` of 0…count−1 in order, done by a few threads, not far ahead of their use."""
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, count, _WINDOW):
            yield from pool.map(work, range(start, min(start + _WINDOW, count)))


def _splits(source: DataSource) -> dict[str, ImageFiles]:
    both: dict[str, Any] = {"train": source.train, "val": source.val}
    return {name: split for name, split in both.items() if split is not None}


def _write(data: DataConfig, files: list[Path], source: DataSource) -> Path:
    """Write the pack, of decoded images if they are small and alike; return its path."""
    small, any_size = files
    try:
        small.parent.mkdir(parents=True, exist_ok=True)
        for path in small.parent.glob(".*.pack.*"):
            if path.stat().st_mtime < time.time() - _LEFT_OVER_S:
                path.unlink(missing_ok=True)
        try:
            _write_pack(small, source, lambda channels: _SmallImages(data, channels))
            return small
        except _NotAlikeError:
            _write_pack(any_size, source, lambda channels: _AnySize(data, channels))
            return any_size
    except OSError as error:
        raise storage_error(error, small.parent) from error


class _AnySize:
    """Stores files unchanged; with ``data.cache_pixels`` decoded, if they are always decoded in full.

    Damaged files stay files.
    """

    def __init__(self, data: DataConfig, channels: int) -> None:
        self._data, self._channels, self._rules = data, channels, PixelRules.of(data)
        #: The header's fields for the samples, once all are stored.
        self.header: dict[str, Any] = {
            "pixels": None, "is_channels_first": False, "has_decoded": data.cache_pixels,
        }  # fmt: skip

    def stored(self, content: bytes) -> bytes:
        """Return the stored bytes of an image file; called in several threads at the same time."""
        if not self._data.cache_pixels:
            return content
        try:
            image = decode(content, self._channels, self._rules)
        except Exception:  # any error of Pillow: the ranks report it when they read the file
            return content
        return as_pixels(image) if packed.may_decode_whole(self._data, min(image.shape[1:])) else content


class _SmallImages(_AnySize):
    """Decodes images to the stored bytes, as long as all are small and alike."""

    def __init__(self, data: DataConfig, channels: int) -> None:
        super().__init__(data, channels)
        self.header["has_decoded"] = False
        self._lock = threading.Lock()

    def stored(self, content: bytes) -> bytes:
        """Return the pixels of an image file. Raises _NotAlikeError."""
        try:
            image = decode(content, self._channels, self._rules)
        except Exception as error:  # any error of Pillow: the ranks report it when they read the file
            raise _NotAlikeError from error
        is_channels_first = image.stride(0) != 1
        pixels = (image if is_channels_first else image.permute(1, 2, 0)).numpy()
        layout = {"pixels": pixels.shape, "is_channels_first": is_channels_first}
        with self._lock:
            if self.header["pixels"] is None:
                side = max(image.shape[1:])
                if side > MAX_DECODED_SIDE or not packed.may_decode_whole(self._data, side):
                    raise _NotAlikeError
                self.header |= layout
            if not layout.items() <= self.header.items():
                raise _NotAlikeError
        return pixels.tobytes()


class _PackWriter:
    """Writes the parts of a pack in order, to a file that nobody reads yet."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0
        self.write(packed.MAGIC)

    def write(self, content: bytes) -> int:
        """Append; return the offset of the end."""
        self._file.write(content)
        self._offset += len(content)
        return self._offset

    def split(self, split: ImageFiles, sample_format: _AnySize) -> dict[str, Any]:
        """Write the samples of a split and their arrays; return its entry of the header."""
        count = len(split)
        arrays = {name: np.zeros(count, dtype) for name, dtype in packed.DTYPES.items() if name != "paths"}
        arrays["ends"], arrays["path_ends"] = np.zeros(count + 1, "<u8"), np.zeros(count + 1, "<u8")
        arrays["classes"][:] = split.classes
        arrays["ends"][0] = self._offset
        progress = _Progress(split, count)
        files = _in_parallel(lambda index: _read(split, index, sample_format), count)
        for index, (stored, nbytes, time_ns) in enumerate(files):
            arrays["hashes"][index] = xxhash.xxh3_64_intdigest(stored)
            arrays["sizes"][index], arrays["times"][index] = nbytes, time_ns
            arrays["ends"][index + 1] = self.write(stored)
            progress.at(index)
        names: list[bytes] = split.paths.tolist()
        arrays["path_ends"][1:] = np.cumsum([len(name) for name in names], dtype=np.uint64)
        arrays["paths"] = np.frombuffer(b"".join(names), dtype=np.uint8)
        return {
            "folder": split.folder.name,
            "samples": count,
            **sample_format.header,
            "arrays": {name: self._array(array) for name, array in arrays.items()},
        }

    def _array(self, array: packed.Array) -> dict[str, Any]:
        begin = self._offset
        self.write(array.tobytes())
        return {"offset": begin, "nbytes": self._offset - begin, "xxh3_128": packed.hash_of(array)}

    def finish(self, header: dict[str, Any]) -> None:
        """Write the header and the footer that points to it."""
        text = json.dumps(header).encode()
        self.write(text)
        self.write(packed.FOOTER.pack(len(text), xxhash.xxh3_128_digest(text), packed.MAGIC))


def _write_pack(path: Path, source: DataSource, make_format: Callable[[int], _AnySize]) -> None:
    """Write a pack. ``make_format``: number of channels → the storage format of a split's samples.

    Raises _NotAlikeError if the images can't be stored in that format; then nothing is left.
    """
    with replacing(path, sync=True) as file:
        writer = _PackWriter(file)
        splits = {
            name: writer.split(split, make_format(split.channels)) for name, split in _splits(source).items()
        }
        writer.finish({"classes": source.info.class_names, "splits": splits})


def _read(split: ImageFiles, index: int, sample_format: _AnySize) -> tuple[bytes, int, int]:
    """Return the bytes to store of a source file, its size and its time of change.

    The time is ``st_ctime``: programs can't set it back, as archives do with modification times.
    """
    path = split.path(index)
    try:
        time_ns = path.stat().st_ctime_ns  # first: a file that changes meanwhile differs from its pack
        content = image_content(os.fspath(path))
        return sample_format.stored(content), len(content), time_ns
    except OSError as error:
        raise BadFileError(
            f"data.cache: {path} can't be packed: {error.strerror}; fix the file or remove it"
        ) from error


class _Progress:
    """Prints the progress of packing a split at intervals."""

    def __init__(self, split: ImageFiles, count: int) -> None:
        self._folder, self._count = split.folder, count
        self._reported_at = time.monotonic()

    def at(self, index: int) -> None:
        """Note that sample ``index`` is packed."""
        if index % _WINDOW == 0 and time.monotonic() > self._reported_at + _REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            say(f"data.cache: {index} of the {self._count} images in {self._folder} are packed")
