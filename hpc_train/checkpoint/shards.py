"""One shard: a safetensors file written with its hash, and pieces of tensors read back from it.

Written here rather than by safetensors' own function, so that the hash is computed on the bytes to be written
(without reading them back) and a full disk is an OSError with its number. Read by ``safe_open``.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.run.checkpoints import FileEntry, new_hash

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

#: Hashed and written in pieces that fit a core's cache (assumed).
_CHUNK_BYTES = 1 << 20
#: Writeback to disk is started each time this much more was written (measured: 8 and 32 MiB are alike, and a
#: save of 1 GB takes two thirds of the time that it takes when fsync starts it).
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be written; ``read`` makes it (on the CPU, contiguous) when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().contiguous())

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return safetensors' name of the dtype; raises BadFileError, naming the tensor, if it has none."""
    if dtype not in DTYPE_NAMES:
        raise BadFileError(f"{name}: a checkpoint can't hold {dtype}; use another dtype")
    return DTYPE_NAMES[dtype]


def write_safetensors(path: Path, entries: Mapping[str, Entry], metadata: dict[str, str]) -> FileEntry:
    """Write the file, on disk when this returns; return its size and hash."""
    # Widest dtypes first: every tensor is then aligned in a memory map.
    names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    digest = new_hash()
    with path.open("wb") as file:
        flush = _Flush(file)
        header = _header({name: entries[name] for name in names}, metadata)
        digest.update(header)
        file.write(header)
        for name in names:
            for chunk in _chunks(entries[name].read()):
                digest.update(chunk)
                file.write(chunk)
                flush.begin(len(chunk))
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(file.tell(), digest.hexdigest())


class _Flush:
    """Starts writeback of what was already written, so that fsync finds little left."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = 0

    def begin(self, nbytes: int) -> None:
        """Count ``nbytes`` more, and start writeback once there are enough."""
        self._waiting += nbytes
        if self._waiting >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            self._waiting = 0
            with suppress(OSError):  # a hint, which not every file system supports
                # Linux starts to write dirty pages, and drops clean ones: nobody reads them soon.
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


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if tensor.numel() == 0:
        return
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    octets = memoryview(flat.view(torch.uint8).numpy().data)
    for begin in range(0, len(octets), _CHUNK_BYTES):
        yield octets[begin : begin + _CHUNK_BYTES]


class ShardReader:
    """One shard that is open for reading."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._names = set(file.keys())

    def read(self, name: str, dtype: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        """Return ``part`` of the tensor, which must have this ``dtype`` and ``shape`` in the file."""
        if name not in self._names:
            raise BadFileError(f"{self._path}: {name} is not in it, though state.json says so")
        view = self._file.get_slice(name)
        found = (view.get_dtype(), tuple(view.get_shape()))
        if found != (dtype, shape):
            raise BadFileError(f"{self._path}: {name} is {found}, state.json says {(dtype, shape)}")
        if all((piece.start, piece.stop) == (0, size) for piece, size in zip(part, shape, strict=True)):
            return self._file.get_tensor(name)
        return view[part]


@contextmanager
def open_shard(path: Path) -> Iterator[ShardReader]:
    """Open a shard; raises BadFileError if it is not a safetensors file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield ShardReader(path, file)
    except SafetensorError as error:
        raise BadFileError(f"{path}: not a safetensors file: {error}") from error
