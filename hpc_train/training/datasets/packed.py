# ruff: noqa: N806  (shape suffixes)
"""Reads a pack: the images of a folder in one file, written by ``hpc-train prepare`` (``datasets.packing``).

    magic │ of each split: samples, arrays │ header, JSON │ footer: size and hash of the header, magic

A sample is its unchanged image file or its decoded pixels: for small images of one size, or with
``data.cache_pixels``. The header describes the two splits: their folder, their samples, and offset, size and
hash of each array. The arrays have one number per sample: its end offset, its class, its XXH3 hash. So the
hash of the header covers everything, and opening a pack reads 20 bytes per sample and creates no Python
object per sample.

Opening checks the header and the arrays that it loads; each read of a sample checks that sample's hash. The
names of the source files are only for messages: nothing opens them. Samples are read by ``pread``, since a
mapped file that is truncated or can't be read kills the process instead of raising an error.

Legend: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
import xxhash
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan.input_files import missing_pack, pack_files
from hpc_train.run.file_shapes import JSON_KEY, Count, decoded, is_a
from hpc_train.run.files import MAX_SMALL_BYTES, UnreadableFileError, open_descriptor

#: The last character is the format's version.
MAGIC = b"hpc-train pack 1"
#: Size and XXH3-128 hash of the header; then ``MAGIC``.
FOOTER = struct.Struct("<Q16s16s")
#: Per sample, little-endian; ``ends`` and ``path_ends`` also have a first number: the start of sample 0.
DTYPES = {
    "ends": "<u8",
    "classes": "<i4",
    "hashes": "<u8",
    "path_ends": "<u8",
    "paths": "|u1",
    "sizes": "<i8",
    "times": "<i8",
}
Array = np.ndarray[Any, Any]
#: Start and end of a path.
_TWO = struct.Struct("<QQ")
#: Maximum size of a source file's relative path.
_MAX_PATH_BYTES = 1 << 16
#: Remedy for a damaged pack, in messages.
REMEDY = "remove the file, then run `hpc-train prepare`"


class DamagedPackError(BadFileError):
    """A pack, or a sample in it, differs from the one ``prepare`` wrote. Never a reason to skip a sample."""


@dataclass(frozen=True)
class Extent:
    """Offset and size of an array in the file, and its XXH3-128 hash in hexadecimal."""

    offset: Count
    nbytes: Count
    digest: str = field(metadata={JSON_KEY: "xxh3_128"})


@dataclass(frozen=True)
class PackedPart:
    """The header's description of one split."""

    #: ``train``, ``val`` or ``test``: the folder below the root.
    folder: Literal["train", "val", "test"]
    num_samples: Count = field(metadata={JSON_KEY: "samples"})
    #: Dimensions of a decoded image in storage order: (H, W, C), or (C, H, W) with ``is_channels_first``.
    #: None: unchanged image files.
    pixels: Annotated[list[Count], lambda sides: len(sides) == 3] | None
    is_channels_first: bool
    #: True if some samples are results of ``decoding.as_pixels`` and the others image files.
    has_decoded: bool
    arrays: dict[str, Extent]


class Pack:
    """An open pack. Raises DamagedPackError unless the file is complete, OSError if it can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_descriptor(path, os.O_RDONLY)
        except UnreadableFileError as error:
            raise DamagedPackError(f"data.cache: {error}; {REMEDY}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.nbytes = os.fstat(self._descriptor).st_size
        #: The hash of the header, which covers everything.
        self.digest, header = self._header()
        names, splits = header.get("classes"), header.get("splits")
        if names is None or not is_a(names, list[str]) or not isinstance(splits, dict):
            raise self.damaged("its header has other fields than a pack's")
        self.class_names: tuple[str, ...] = tuple(names)
        self.parts = {name: self._part(entry) for name, entry in splits.items()}
        if "train" not in self.parts or not self.parts.keys() <= {"train", "val"}:
            raise self.damaged("its header has other splits than train and val")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        content = os.pread(self._descriptor, nbytes, offset)
        while len(content) < nbytes and (
            more := os.pread(self._descriptor, nbytes - len(content), offset + len(content))
        ):
            content += more
        return content

    def read_into(self, place: memoryview, offset: int) -> bool:
        """Fill ``place``; return False if the file ends first."""
        count = os.preadv(self._descriptor, [place], offset)
        while 0 < count < len(place) and (
            more := os.preadv(self._descriptor, [place[count:]], offset + count)
        ):
            count += more
        return count == len(place)

    def array(self, part: PackedPart, name: str) -> Array:
        """Return an array of a split. Raises DamagedPackError unless its size and hash match."""
        extent, dtype = part.arrays[name], np.dtype(DTYPES[name])
        if extent.offset + extent.nbytes > self.nbytes or extent.nbytes % dtype.itemsize:
            raise self.damaged(f"its array {name} has no place in the file")
        content = np.empty(extent.nbytes, dtype=np.uint8)
        if not self.read_into(content.data, extent.offset) or hash_of(content) != extent.digest:
            raise self.damaged(f"the hash of its array {name} is not the header's")
        return content.view(dtype)

    def damaged(self, why: str) -> DamagedPackError:
        """Return the error to raise."""
        return DamagedPackError(f"data.cache: {self.path} is not a complete, undamaged pack: {why}; {REMEDY}")

    def _part(self, entry: object) -> PackedPart:
        part = decoded(PackedPart, entry)
        if part is None or part.arrays.keys() != DTYPES.keys():
            raise self.damaged("its header has other fields than a pack's")
        return part

    def _header(self) -> tuple[bytes, Mapping[str, Any]]:
        if self.read(0, len(MAGIC)) != MAGIC:
            raise self.damaged("it does not begin like one of this version of hpc-train")
        footer = self.read(max(0, self.nbytes - FOOTER.size), FOOTER.size)
        nbytes, digest, magic = FOOTER.unpack(footer) if len(footer) == FOOTER.size else (0, b"", b"")
        if magic != MAGIC or not 0 < nbytes <= min(MAX_SMALL_BYTES, self.nbytes):
            raise self.damaged("its end is missing")
        text = self.read(self.nbytes - FOOTER.size - nbytes, nbytes)
        if xxhash.xxh3_128_digest(text) != digest:
            raise self.damaged("the hash of its header is another")
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.damaged("its header is not JSON") from error
        return digest, header if isinstance(header, dict) else {}


def hash_of(content: bytes | Array) -> str:
    """Return the XXH3-128 hash of an array in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(content if isinstance(content, bytes) else content.data)


class PackedSplit:
    """One split of a pack, read sample by sample; base of the two formats."""

    def __init__(self, pack: Pack, part: PackedPart, root: Path) -> None:
        """``root``: the folder that was packed, for messages."""
        self.pack, self.part, self._root = pack, part, root
        self.ends, self.classes, self.hashes = (
            pack.array(part, name) for name in ("ends", "classes", "hashes")
        )
        count = part.num_samples
        if (len(self.ends), len(self.classes), len(self.hashes)) != (count + 1, count, count):
            raise pack.damaged("its arrays differ in length")
        in_order = bool(np.all(self.ends[1:] >= self.ends[:-1])) and int(self.ends[-1]) <= pack.nbytes
        named = count == 0 or (self.classes.min() >= 0 and self.classes.max() < len(pack.class_names))
        if not (in_order and named):
            raise pack.damaged("its arrays have values out of range")

    def __len__(self) -> int:
        return self.part.num_samples

    def path(self, index: int) -> Path:
        """Return the source file of a sample, as far as the pack can be read, for messages."""
        return Path(f"{self._root}/{self.part.folder}/{self._source_name(index) or f'sample {index}'}")

    def _source_name(self, index: int) -> str | None:
        extents = self.part.arrays
        try:
            ends = self.pack.read(extents["path_ends"].offset + 8 * index, 16)
            begin, end = _TWO.unpack(ends) if len(ends) == _TWO.size else (0, 0)
            if not begin < end <= min(extents["paths"].nbytes, begin + _MAX_PATH_BYTES):
                return None
            return os.fsdecode(self.pack.read(extents["paths"].offset + begin, end - begin))
        except OSError:  # the first failed read is the one to report
            return None

    def content(self, index: int) -> bytes | bytearray:
        """Return the stored content of a sample. Raises DamagedPackError if it does not match its hash."""
        begin, end = int(self.ends[index]), int(self.ends[index + 1])
        content: bytes | bytearray
        if self.part.has_decoded:  # writable memory, from which torch makes a tensor without a copy
            content = bytearray(end - begin)
            is_whole = self.pack.read_into(memoryview(content), begin)
        else:
            content = self.pack.read(begin, end - begin)
            is_whole = len(content) == end - begin
        if not is_whole or xxhash.xxh3_64_intdigest(content) != int(self.hashes[index]):
            self.refuse(index)
        return content

    def refuse(self, index: int) -> NoReturn:
        """Raise the error for a damaged sample."""
        raise self.pack.damaged(f"the hash of sample {index} ({self.path(index)}) is not the stored one")


class PackedFiles(PackedSplit):
    """A ``FileSplit`` of a pack: image files, or results of ``decoding.as_pixels``."""

    def __init__(self, pack: Pack, part: PackedPart, root: Path, channels: int) -> None:
        super().__init__(pack, part, root)
        self.channels = channels

    def file_content(self, index: int, /) -> tuple[bytes | bytearray, int]:
        """Return the content, for ``decoding.read_image``, and the sample's class."""
        return self.content(index), int(self.classes[index])


class PackedPixels(PackedSplit):
    """An ``ArraySplit`` of a pack with decoded images."""

    def __init__(self, pack: Pack, part: PackedPart, root: Path) -> None:
        super().__init__(pack, part, root)
        assert part.pixels is not None
        self._shape = part.pixels
        self._nbytes = part.pixels[0] * part.pixels[1] * part.pixels[2]
        if not bool(np.all(np.diff(self.ends) == self._nbytes)):
            raise pack.damaged("its images differ in size")

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8, in the memory layout of a batch of decoded files, and classes."""
        chosen = indices.numpy()
        pixels_BP = np.empty((len(chosen), self._nbytes), dtype=np.uint8)
        place = pixels_BP.reshape(-1).data
        starts, hashes = self.ends[chosen].tolist(), self.hashes[chosen].tolist()
        for row, (start, stored) in enumerate(zip(starts, hashes, strict=True)):
            part = place[row * self._nbytes : (row + 1) * self._nbytes]
            if not self.pack.read_into(part, start) or xxhash.xxh3_64_intdigest(part) != stored:
                self.refuse(int(chosen[row]))
        images = torch.from_numpy(pixels_BP).view(len(chosen), *self._shape)
        images_BCHW = images if self.part.is_channels_first else images.permute(0, 3, 1, 2)
        return images_BCHW, torch.from_numpy(self.classes[chosen].astype(np.int64))


def find_pack(data: DataConfig) -> Pack:
    """Return the pack of the current content of ``data.root``. Raises BadFileError if there is none.

    Images that were changed in place, under the same names, are detected only by ``prepare``.
    """
    for path in pack_files(data) or ():
        try:
            pack = Pack(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise BadFileError(f"data.cache: {path} can't be read: {error.strerror}; fix its mode") from error
        if may_read(data, pack.parts["train"]):
            return pack
    message, remedy = missing_pack(data)
    raise BadFileError(f"data.cache: {message}; {remedy}")


def may_read(data: DataConfig, part: PackedPart) -> bool:
    """Return True if the split has the same pixels as the image files.

    Decoded images do not if random crops would decode a JPEG file at a fraction of its size.
    """
    return part.pixels is None or may_decode_whole(data, max(part.pixels))


def may_decode_whole(data: DataConfig, side: int) -> bool:
    """Return True if images with a side of at most this many pixels are always decoded in full."""
    size = data.height_and_width
    return data.augment.random_resized_crop is None or size is None or side < 2 * min(size)


def open_split(pack: Pack, name: str, root: Path, channels: int) -> PackedFiles | PackedPixels:
    """Return the split ``train`` or ``val`` of a pack of ``root``. Raises DamagedPackError."""
    part = pack.parts[name]
    if part.pixels is None:
        return PackedFiles(pack, part, root, channels)
    if part.pixels[0 if part.is_channels_first else 2] != channels:
        raise pack.damaged(f"its images don't have {channels} channels")
    return PackedPixels(pack, part, root)
