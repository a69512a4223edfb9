"""``digests.bin``: one record per training step, by which two runs, or a run and its replay, are compared.

A file is a header of 16 bytes (magic, version, record size), then records of 40 bytes, little-endian, in the
order of their steps:

    step        uint64   as in the ``train`` rows: the number of completed steps
    samples     uint64   digest of the indices that the step read, by micro-batch; for any number of ranks
    loss        float64  mean loss, added up over ranks in their order
    grad_norm   float64  norm of the gradients before clipping
    attempt     uint16   the low bits of the attempt that trained the step
    flags       uint16   bit 0: the step has a ``grad_norm``
    check       uint32   XXH32 of the bytes before it

Training writes it through ``DigestsFile``; everything else reads it, in constant memory and without torch.
``shard_digests`` are those of the tensors of a checkpoint, which are compared with a replay's.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.growing_file import GrowingFile

_MAGIC = b"hpctdig\0"
VERSION = 1
_HEADER = struct.Struct("<8sII")
_BODY = struct.Struct("<QQddHH")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CHECK.size
#: Later steps have no digest, so that the file has at most 400 MB.
MAX_STEP = 10_000_000
_HAS_NORM = 1
_RECORDS_AT_A_TIME, _BYTES_AT_A_TIME = 4096, 1 << 20


@dataclass(frozen=True)
class StepDigest:
    """The record of one step. Numbers are compared by their bits, and any NaN equals any other."""

    step: int
    samples: int
    loss: float
    #: None if the step did not compute it: it is neither clipped nor checked.
    grad_norm: float | None
    attempt: int = 0

    def differences(self, other: StepDigest) -> list[str]:
        """Return the names of the numbers that differ; ``grad_norm`` only if both have one."""
        names = [] if self.samples == other.samples else ["samples"]
        if not same_bits(self.loss, other.loss):
            names.append("loss")
        if None not in (self.grad_norm, other.grad_norm) and not same_bits(self.grad_norm, other.grad_norm):
            names.append("grad_norm")
        return names

    def encoded(self) -> bytes:
        """Return the record."""
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        flags = 0 if self.grad_norm is None else _HAS_NORM
        numbers = (_plain(self.loss), _plain(norm), self.attempt & 0xFFFF, flags)
        body = _BODY.pack(self.step, self.samples, *numbers)
        return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def same_bits(first: float | None, second: float | None) -> bool:
    """Return True if two numbers are bitwise identical, or both are NaN, or both are missing."""
    if first is None or second is None:
        return first is second
    return struct.pack("<d", _plain(first)) == struct.pack("<d", _plain(second))


def _plain(number: float) -> float:
    """Return the number with one bit pattern for all NaN, whose sign and payload depend on the hardware."""
    return math.nan if math.isnan(number) else number


def _decoded(record: bytes) -> StepDigest | None:
    body = record[: _BODY.size]
    if len(record) < RECORD_BYTES or _CHECK.unpack(record[_BODY.size :])[0] != xxhash.xxh32_intdigest(body):
        return None
    step, samples, loss, norm, attempt, flags = _BODY.unpack(body)
    return StepDigest(step, samples, loss, norm if flags & _HAS_NORM else None, attempt)


def read_digests(path: Path, first: int = 0, last: int = MAX_STEP) -> Iterator[StepDigest]:
    """Yield the digests of the steps ``first`` to ``last`` in order; none if there is no file.

    Damaged records are omitted. Raises BadFileError if a later version wrote the file.
    """
    try:
        file = open_regular(path)
    except (FileNotFoundError, UnreadableFileError):
        return
    with file:
        if _has_header(file, path):
            _go_to(file, first)
            for digest in _records(file):
                if digest.step > last:
                    return
                if digest.step >= first:
                    yield digest


def _has_header(file: BinaryIO, path: Path) -> bool:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, version, size = _HEADER.unpack(header)
    if magic == _MAGIC and version > VERSION:
        raise BadFileError(
            f"{path}: has version {version} and this hpc-train reads {VERSION}; use a newer one"
        )
    return bool(magic == _MAGIC and version == VERSION and size == RECORD_BYTES)


def _go_to(file: BinaryIO, step: int) -> None:
    """Seek to a record at or before ``step``, by bisection; a damaged record ends it early."""
    low, high = 0, (file.seek(0, os.SEEK_END) - _HEADER.size) // RECORD_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        file.seek(_HEADER.size + middle * RECORD_BYTES)
        digest = _decoded(file.read(RECORD_BYTES))
        if digest is None:
            break
        low, high = (middle, high) if digest.step <= step else (low, middle)
    file.seek(_HEADER.size + low * RECORD_BYTES)


def _records(file: BinaryIO) -> Iterator[StepDigest]:
    """Yield the intact records from here on, as long as their steps rise."""
    newest = -1
    while block := file.read(RECORD_BYTES * _RECORDS_AT_A_TIME):
        for begin in range(0, len(block), RECORD_BYTES):
            digest = _decoded(block[begin : begin + RECORD_BYTES])
            if digest is not None and digest.step > newest:
                newest = digest.step
                yield digest


class DigestsFile(GrowingFile):
    """The digests up to the step from which this attempt continues, followed by this attempt's digests."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._resumed_step = resumed_step
        self._newest = 0
        super().__init__(path)
        if self._end == 0:
            self.write(_HEADER.pack(_MAGIC, VERSION, RECORD_BYTES))

    @override
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        if not _has_header(old, self._path):
            return
        new.write(_HEADER.pack(_MAGIC, VERSION, RECORD_BYTES))
        for digest in _records(old):
            if digest.step > self._resumed_step:
                return
            self._newest = digest.step
            new.write(digest.encoded())

    def append(self, digests: list[StepDigest]) -> None:
        """Write the digests of consecutive steps to the operating system."""
        steps = [digest.step for digest in digests]
        assert steps == sorted(set(steps)) and (not steps or steps[0] > self._newest), steps
        self._newest = steps[-1] if steps else self._newest
        self.write(b"".join(digest.encoded() for digest in digests if digest.step <= MAX_STEP))

    def reopened(self, resumed_step: int) -> DigestsFile:
        """Return the same file, already closed, without the digests after ``resumed_step``."""
        return DigestsFile(self._path, resumed_step)


def shard_digests(shard: Path) -> dict[str, str]:
    """Return the XXH3-64 of each tensor's bytes in a rank's shard; pieces of a tensor count in their order.

    Raises BadFileError if the shard can't be read.
    """
    digests: dict[str, xxhash.xxh3_64] = {}
    try:
        with open_regular(shard) as file:
            begin = 8 + struct.unpack("<Q", file.read(8))[0]
            if begin > os.fstat(file.fileno()).st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(begin - 8))
            header.pop("__metadata__", None)
            # All but the first piece of a tensor have a number: ``name..1``.
            keys = {key: key.partition("..") for key in header}
            for key in sorted(keys, key=lambda key: int(keys[key][2] or 0)):
                first, end = header[key]["data_offsets"]
                digest = digests.setdefault(keys[key][0], xxhash.xxh3_64())
                file.seek(begin + first)
                for place in range(first, end, _BYTES_AT_A_TIME):
                    digest.update(file.read(min(_BYTES_AT_A_TIME, end - place)))
    except (OSError, UnreadableFileError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BadFileError(f"{shard}: can't be read: {error}") from error
    return {name: digest.hexdigest() for name, digest in digests.items()}
