"""One shard: a safetensors file written with its hash, and pieces of tensors read back from it.

Not written and read by safetensors' functions: here the hash is computed on the bytes to be written, without
reading them back, pieces are read directly into the target tensors, and a disk error is an OSError with its
number, while with a memory map of a damaged file it would kill the process.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.run.checkpoints import FileEntry
from hpc_train.run.files import UnreadableFileError, open_regular, sync_file

#: safetensors' names of the dtypes.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: Bytes that are hashed and written at once; they fit into a core's cache (assumed).
_CHUNK_BYTES = 1 << 20
#: Bytes between starts of writeback to disk (measured: 8 and 32 MiB are equal, and a save of 1 GB takes two
#: thirds of the time that it takes if fsync starts it).
_FLUSH_BYTES = 32 << 20
#: Bytes that are read at once if a tensor can't be read in place (assumed).
_BLOCK_BYTES = 16 << 20
#: safetensors' limit.
_MAX_HEADER_BYTES = 100 << 20
#: Below the maximum of one system call on Linux.
_MAX_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be written; ``read`` returns it lazily, on the CPU and contiguous."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Return the entry of a CPU tensor; it must not change until the file is written."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().contiguous())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return safetensors' name of the dtype; raises BadFileError with the tensor's name if it has none."""
    if dtype not in DTYPE_NAMES:
        raise BadFileError(f"{name}: a checkpoint can't hold {dtype}; use another dtype")
    return DTYPE_NAMES[dtype]


def write_safetensors(path: Path, entries: Mapping[str, Entry], metadata: dict[str, str]) -> FileEntry:
    """Write the file and sync it to disk; return its size and hash."""
    # Widest dtypes first, so that every tensor is aligned in a memory map.
    names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        flush = _Flush(file)
        header = _header({name: entries[name] for name in names}, metadata)
        digest.update(header)
        file.write(header)
        for name in names:
            octets = _memory(entries[name].read())
            for begin in range(0, len(octets), _CHUNK_BYTES):
                chunk = octets[begin : begin + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                flush.begin(len(chunk))
        file.flush()
        sync_file(file.fileno())
        return FileEntry(file.tell(), digest.hexdigest())


class _Flush:
    """Starts writeback during writing, so that little is left for fsync."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = 0

    def begin(self, nbytes: int) -> None:
        """Add ``nbytes``, and start writeback once there are enough."""
        self._waiting += nbytes
        if self._waiting >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            self._waiting = 0
            with suppress(OSError):  # a hint, which not every file system supports
                # Linux starts to write dirty pages and drops clean pages, which are not read soon.
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(entries: Mapping[str, Entry], metadata: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        fields[name] = {
            "dtype": dtype_name(name, entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, shared with the tensor."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return memoryview(flat.view(torch.uint8).numpy().data)


class ShardReader:
    """A shard that is open for reading."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        size = os.fstat(file.fileno()).st_size
        length = struct.unpack("<Q", self._octets(0, 8))[0] if size >= 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise self._damaged("its header is longer than the file")
        self._begin = 8 + length
        self._num_bytes = size - self._begin
        try:
            self._header: dict[str, Any] = dict(json.loads(self._octets(8, length)))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON: {error}") from error

    def read_into(
        self, target: Tensor, name: str, dtype: str, shape: tuple[int, ...], part: Sequence[slice]
    ) -> None:
        """Copy ``part`` of tensor ``name``, one slice per dimension, into ``target`` of the same shape.

        Raises BadFileError unless the tensor has this ``dtype`` and ``shape`` in the file.
        """
        begin = self._offset(name, dtype, shape)
        rows = part[0] if part else slice(0, 1)
        inner = tuple(part[1:])
        row_nbytes = math.prod(shape[1:]) * DTYPES[dtype].itemsize
        is_whole = all((cut.start, cut.stop) == (0, size) for cut, size in zip(inner, shape[1:], strict=True))
        begin += rows.start * row_nbytes
        if (
            is_whole
            and target.dtype == DTYPES[dtype]
            and target.device.type == "cpu"
            and target.is_contiguous()
        ):
            self._fill(_memory(target), begin)
            return
        self._read_by_blocks(target, begin, (rows.stop - rows.start, *shape[1:]), DTYPES[dtype], inner)

    def _read_by_blocks(
        self, target: Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype, inner: tuple[slice, ...]
    ) -> None:
        """Read rows at ``begin`` into a buffer, a block at a time, and copy their part ``inner``."""
        rows = target if target.dim() else target.reshape(1)
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        at_once = max(1, min(shape[0], _BLOCK_BYTES // max(1, row_nbytes)))
        block = torch.empty((at_once, *shape[1:]), dtype=dtype)
        for row in range(0, shape[0], at_once):
            part = block[: shape[0] - row]
            self._fill(_memory(part), begin + row * row_nbytes)
            rows[row : row + len(part)].copy_(part[(slice(None), *inner)])

    def _offset(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Return the position of the tensor's first byte in the file."""
        if name not in self._header:
            raise BadFileError(f"{self._path}: {name} is not in it, though state.json says so")
        try:
            entry = self._header[name]
            described = (entry["dtype"], tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            fits = 0 <= begin <= end <= self._num_bytes
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its header says {self._header[name]!r:.80} of {name}") from error
        if described != (dtype, shape):
            raise BadFileError(f"{self._path}: {name} is {described}, state.json says {(dtype, shape)}")
        if not fits or type(begin) is not int or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise self._damaged(f"its header gives {name} the bytes {begin!r:.40} to {end!r:.40}")
        return self._begin + begin

    def _fill(self, memory: memoryview, begin: int) -> None:
        """Read into all of ``memory`` from byte ``begin`` of the file."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done : done + _MAX_READ_BYTES]], begin + done)
            if count == 0:
                raise self._damaged("it ends early")
            done += count

    def _octets(self, begin: int, length: int) -> bytearray:
        octets = bytearray(length)
        self._fill(memoryview(octets), begin)
        return octets

    def _damaged(self, why: str) -> BadFileError:
        return BadFileError(f"{self._path}: not a safetensors file: {why}")


@contextmanager
def open_shard(path: Path) -> Iterator[ShardReader]:
    """Open a shard, verified or not; raises BadFileError if it is not a safetensors file."""
    try:
        with open_regular(path, "rb") as file:
            yield ShardReader(path, file)
    except UnreadableFileError as error:
        raise BadFileError(str(error)) from error
