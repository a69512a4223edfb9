"""Token files of other programs: nanoGPT, llm.c and Megatron. No torch: ``plan`` counts samples.

::

    train.bin                   nanoGPT: uint16 tokens, or uint32 if the vocabulary needs it, without a header
    train.bin, train.idx        Megatron: the .idx file has the dtype
    fineweb_train_000001.bin    llm.c: a header of 1024 bytes with magic, version and number of tokens

A file's dtype comes from its header, else from the vocabulary, and is compared with blocks of its content. A
variant is therefore read correctly or refused, never misread. Called by ``token_shards``.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_train.errors import BadFileError

RawDtype = Literal["uint16", "uint32"]
ITEM_BYTES: dict[str, int] = {"uint16": 2, "uint32": 4}
#: nanoGPT: train.bin. llm.c: tiny_shakespeare_val.bin, fineweb_train_000001.bin.
RAW_NAME = re.compile(r"(?:.*[_-])?(train|val)(?:[_-]\d+)?\.bin")
#: llm.c's header: 256 int32, of which the first are magic, version and number of tokens.
_LLMC, _LLMC_BYTES = struct.Struct("<iii"), 1024
_LLMC_DTYPES: dict[tuple[int, int], RawDtype] = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
#: llm.c's magics are dates; the magics of its other files (evaluation data, weights) are near these.
_LLMC_MAGICS = range(20230101, 20400101)
_MEGATRON_MAGICS = (b"MMIDIDX\0\0", b"TNTIDX\0\0")
#: Megatron's index begins with magic, version, dtype code, number of sequences and of documents; lengths
#: (int32) and offsets (int64, in bytes) of the sequences follow.
_MEGATRON = struct.Struct("<9sQBQQ")
#: int32, uint16.
_MEGATRON_DTYPES: dict[int, RawDtype] = {4: "uint32", 8: "uint16"}
#: First bytes of files that are not raw tokens, whatever their name.
_OTHER_FORMATS = {
    b"\x93NUMPY": "a NumPy file",
    b"PK\x03\x04": "a zip archive (.npz or torch.save)",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"PAR1": "a Parquet file",
    b"hpc-train tokens": "a shard of hpc-train",
    **dict.fromkeys(_MEGATRON_MAGICS, "Megatron's index"),
}
_REWRITE = (
    "write it again with numpy: tokens.astype('<u2').tofile(path), or '<u4' for more than 65,536 tokens"
)
#: Evenly spaced blocks of a file that are compared with its dtype. Each is a multiple of 8 bytes.
_BLOCKS, _BLOCK_BYTES = 4, 2048
#: The upper half of a uint32 token is below this: no vocabulary has 4 million tokens.
_MAX_UPPER_HALF = 64
#: Assumed: fewer numbers show no pattern.
_MIN_PATTERN = 4
_MIN_TEXT_BYTES = 64
#: Type codes of ``array``.
_CODES: dict[RawDtype, str] = {"uint16": "H", "uint32": "I"}
_TEXT = frozenset(b"\t\n\r\f" + bytes(range(0x20, 0x7F)))


@dataclass(frozen=True)
class Shard:
    """A file of tokens: little-endian integers from byte ``offset`` on."""

    path: Path
    num_tokens: int
    offset: int


def raw_shards(
    files: Mapping[str, Sequence[Path]], dtype: RawDtype | None, vocabulary_size: int
) -> tuple[dict[str, tuple[Shard, ...]], RawDtype]:
    """Return split → shards, and their common dtype; ``dtype``: configured, for files without a header.

    Raises BadFileError for a file that does not match its name and the vocabulary.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    dtypes: dict[RawDtype, Path] = {}
    for part, paths in files.items():
        pairs = [_raw_shard(path, dtype, vocabulary_size) for path in paths]
        dtypes = {actual: path for path, (_, actual) in zip(paths, pairs, strict=True)} | dtypes
        if pairs:
            shards[part] = tuple(shard for shard, _ in pairs)
    if len(dtypes) > 1:
        raise BadFileError(
            f"data.root: {dtypes['uint16']} has uint16 tokens and {dtypes['uint32']} uint32; {_REWRITE}"
        )
    return shards, next(iter(dtypes))


def _raw_shard(path: Path, stated: RawDtype | None, vocabulary_size: int) -> tuple[Shard, RawDtype]:
    with path.open("rb") as file:
        start = file.read(_LLMC_BYTES)
        nbytes = os.fstat(file.fileno()).st_size
        _refuse_other_formats(path, start)
        header = _llmc_header(path, start) or _megatron_header(path) or (None, None, 0)
        count, header_dtype, offset = header
        content = _Sample(path, _blocks(file.fileno(), offset, nbytes), vocabulary_size)
    dtype = header_dtype or stated or content.dtype()
    if stated not in (None, dtype):
        raise BadFileError(f"data.args.dtype: {stated}, but {path} has {dtype} by its header; take it out")
    if stated is None:
        content.check(dtype, _REWRITE if header_dtype else "write data.args.dtype: uint16")
    size = ITEM_BYTES[dtype]
    if (nbytes - offset) % size:
        raise BadFileError(f"data.root: {path} has {nbytes} bytes, not whole {dtype} tokens; copy it again")
    num_tokens = (nbytes - offset) // size
    if count not in (None, num_tokens):
        raise BadFileError(
            f"data.root: {path} has {nbytes} bytes, and its {'header' if offset else '.idx file'} says "
            f"{offset + size * (count or 0)}; {'copy it again' if offset else 'copy or write both again'}"
        )
    return Shard(path, num_tokens, offset), dtype


def _refuse_other_formats(path: Path, start: bytes) -> None:
    form = next((form for magic, form in _OTHER_FORMATS.items() if start.startswith(magic)), None)
    if form is None and len(start) >= _MIN_TEXT_BYTES and _TEXT.issuperset(start):
        raise BadFileError(f"data.root: {path} is text, not tokens; rename it to train.txt or val.txt")
    if form is not None:
        raise BadFileError(f"data.root: {path} is {form}, not raw tokens; {_REWRITE}")


def _llmc_header(path: Path, start: bytes) -> tuple[int, RawDtype, int] | None:
    """Return number of tokens, dtype and size of llm.c's header; None if there is none."""
    if len(start) < _LLMC.size:
        return None
    magic, version, count = _LLMC.unpack_from(start)
    if (dtype := _LLMC_DTYPES.get((magic, version))) is not None:
        return count, dtype, _LLMC_BYTES
    is_swapped = struct.unpack_from(">i", start)[0] in _LLMC_MAGICS
    # The rest of a header is zeros; the rest of tokens is not.
    if (magic in _LLMC_MAGICS or is_swapped) and not any(start[_LLMC_BYTES // 2 :]):
        kind = "in big-endian byte order" if is_swapped else f"of magic {magic}, version {version}"
        versions = ", ".join(f"magic {magic}, version {number}" for magic, number in _LLMC_DTYPES)
        raise BadFileError(
            f"data.root: {path} has a header like llm.c's {kind}, and token files have {versions}; write it "
            "again with llm.c's data scripts"
        )
    return None


def _megatron_header(path: Path) -> tuple[int, RawDtype, int] | None:
    """Return number of tokens, dtype and offset by Megatron's ``.idx`` file; None if there is none."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        return None
    with index.open("rb") as file:
        start = file.read(_MEGATRON.size)
        magic, version, code, count, _ = _MEGATRON.unpack(start.ljust(_MEGATRON.size, b"\0"))
        if magic != _MEGATRON_MAGICS[0] or version != 1 or code not in _MEGATRON_DTYPES:
            raise BadFileError(
                f"data.root: {index} is not an index of Megatron's version 1 for int32 or uint16 tokens "
                f"(dtype code {code}); convert {path.name}, or remove the .idx file if it belongs to "
                "something else"
            )
        dtype, offsets = _MEGATRON_DTYPES[code], _MEGATRON.size + 4 * count
        if os.fstat(file.fileno()).st_size < offsets + 8 * count:
            raise BadFileError(f"data.root: {index} ends before its {count} sequences; copy it again")
        if count == 0:
            return 0, dtype, 0
        last = os.pread(file.fileno(), 4, offsets - 4) + os.pread(file.fileno(), 8, offsets + 8 * count - 8)
    length, start_byte = struct.unpack("<iq", last)
    return length + start_byte // ITEM_BYTES[dtype], dtype, 0


def _blocks(descriptor: int, offset: int, nbytes: int) -> list[bytes]:
    """Return evenly spaced blocks, aligned to 8 bytes; all of a small file."""
    length = nbytes - offset
    if length <= _BLOCKS * _BLOCK_BYTES:
        return [os.pread(descriptor, max(0, length), offset)]
    step = (length - _BLOCK_BYTES) // (_BLOCKS - 1) // 8 * 8
    starts = [offset + number * step for number in range(_BLOCKS)]
    return [os.pread(descriptor, _BLOCK_BYTES, start) for start in starts]


class _Sample:
    """Blocks of a file, to be compared with the dtypes that its tokens may have."""

    def __init__(self, path: Path, blocks: list[bytes], vocabulary_size: int) -> None:
        self._path, self._blocks, self._vocabulary_size = path, blocks, vocabulary_size

    def dtype(self) -> RawDtype:
        """Return the dtype of a file without a header."""
        is_wide = self._vocabulary_size > 1 << 16 or self._has_upper_halves()
        return "uint32" if is_wide or self._is_zero_at_odd_places("I") else "uint16"

    def check(self, dtype: RawDtype, remedy: str) -> None:
        """Raise BadFileError, with ``remedy``, if the content has another dtype or byte order."""
        if self._blocks and len(self._blocks[-1]) >= _BLOCK_BYTES and not any(self._blocks[-1]):
            self._refuse("its last tokens are all 0, as if its writing was interrupted", "write it again")
        if dtype == "uint16" and self._has_upper_halves():
            self._refuse("its tokens look like uint32: every other uint16 is near 0", remedy)
        if dtype == "uint32" and self._is_zero_at_odd_places("I"):
            self._refuse("its tokens look like int64: every other uint32 is 0", _REWRITE)
        if self._is_big_endian(dtype):
            self._refuse("its tokens look big-endian", _REWRITE)
        if dtype == "uint32" and self._num_beyond(dtype) and not self._has_upper_halves():
            self._refuse("its tokens look like uint16", remedy)

    def _is_big_endian(self, dtype: RawDtype) -> bool:
        """Return True if all low bytes are 0, or many tokens exceed the vocabulary but fit if swapped."""
        numbers = [number for block in self._numbers(_CODES[dtype]) for number in block]
        if len(numbers) < _MIN_PATTERN:
            return False
        if any(numbers) and not any(number & 0xFF for number in numbers):
            return True
        is_many = self._num_beyond(dtype) > max(1, len(numbers) // 16)
        return is_many and not self._num_beyond(dtype, swapped=True)

    def _num_beyond(self, dtype: RawDtype, *, swapped: bool = False) -> int:
        blocks = self._numbers(_CODES[dtype], swapped=swapped)
        return sum(number >= self._vocabulary_size for block in blocks for number in block)

    def _has_upper_halves(self) -> bool:
        """Return True if uint16 numbers at odd positions are upper halves of uint32 tokens.

        That is if all are near 0, but at least a quarter of the others are not.
        """
        lower, upper = self._alternating("H")
        if len(upper) < _MIN_PATTERN or max(upper) >= _MAX_UPPER_HALF:
            return False
        minimum = _MAX_UPPER_HALF if any(upper) else 1
        return sum(number >= minimum for number in lower) > len(lower) // 4

    def _is_zero_at_odd_places(self, code: str) -> bool:
        lower, upper = self._alternating(code)
        return len(upper) >= _MIN_PATTERN and not any(upper) and sum(map(bool, lower)) > len(lower) // 2

    def _alternating(self, code: str) -> tuple[list[int], list[int]]:
        blocks = self._numbers(code)
        return [n for block in blocks for n in block[::2]], [n for block in blocks for n in block[1::2]]

    def _numbers(self, code: str, *, swapped: bool = False) -> list[array[int]]:
        decoded = []
        for content in self._blocks:
            numbers = array(code)
            numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
            if swapped == (sys.byteorder == "little"):
                numbers.byteswap()
            decoded.append(numbers)
        return decoded

    def _refuse(self, why: str, remedy: str) -> None:
        raise BadFileError(f"data.root: {self._path}: {why}; {remedy}")
