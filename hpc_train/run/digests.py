"""The digests of a run, by which it is compared with another run, or with its replay.

``digests.bin`` has a record per training step, ``parts.bin`` one per part of the model every few steps. A
file is a header of 16 bytes (magic, version, record size), then records of 40 bytes, little-endian, in the
order of their steps (and parts):

    step        uint64   as in the ``train`` rows: the number of completed steps
    samples     uint64   digest of the indices that the step read, by micro-batch; for any number of ranks
    loss        float64  mean loss, added up over ranks in their order
    grad_norm   float64  norm of the gradients before clipping
    attempt     uint16   the low bits of the attempt that trained the step
    flags       uint16   bit 0: the step has a ``grad_norm``
    check       uint32   XXH32 of the bytes before it

    step        uint64
    part        uint64   XXH3-64 of the part's name, as in ``parts_of``
    weights     uint64   digest of its weights, buffers and averages, see ``part_digests``
    optimizer   uint64   digest of the optimizer's state of its weights
    attempt     uint16
    ranks       uint16   the low bits of the number of ranks
    check       uint32

Training writes it through ``DigestsFile``; everything else reads it, in constant memory and without torch.
``shard_digests`` are those of the tensors of a checkpoint, which are compared with a replay's.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, ClassVar, Generic, Protocol, Self, TypeVar

import xxhash
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.run.files import UnreadableFileError, open_regular, sync_file
from hpc_train.run.growing_file import GrowingFile

VERSION = 1
_HEADER = struct.Struct("<8sII")
_CHECK = struct.Struct("<I")
RECORD_BYTES = 40
#: Later steps have no digest, so that the file has at most 400 MB.
MAX_STEP = 10_000_000
#: A run has records of parts at this many steps at most, and of this many parts per rank: at most 10 MB for
#: ranks that have the same modules.
MAX_PART_STEPS, MAX_PARTS = 4096, 64
_HAS_NORM = 1
_OPTIMIZER = "optimizer."
_RECORDS_AT_A_TIME, _BYTES_AT_A_TIME = 4096, 1 << 20


class _Record(Protocol):
    MAGIC: ClassVar[bytes]

    @property
    def step(self) -> int: ...

    @property
    def place(self) -> tuple[int, int]: ...

    @property
    def body(self) -> bytes: ...

    @classmethod
    def decoded(cls, body: bytes) -> Self: ...


Record = TypeVar("Record", bound=_Record)
Record_contra = TypeVar("Record_contra", contravariant=True)


@dataclass(frozen=True)
class StepDigest:
    """The record of one step. Numbers are compared by their bits, and any NaN equals any other."""

    MAGIC: ClassVar[bytes] = b"hpctdig\0"
    _BODY: ClassVar[struct.Struct] = struct.Struct("<QQddHH")

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

    @property
    def place(self) -> tuple[int, int]:
        """The order of records in the file."""
        return self.step, 0

    @property
    def body(self) -> bytes:
        """The record without its check."""
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        flags = 0 if self.grad_norm is None else _HAS_NORM
        numbers = (_plain(self.loss), _plain(norm), self.attempt & 0xFFFF, flags)
        return self._BODY.pack(self.step, self.samples, *numbers)

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        """Return the digest of a record without its check."""
        step, samples, loss, norm, attempt, flags = cls._BODY.unpack(body)
        return cls(step, samples, loss, norm if flags & _HAS_NORM else None, attempt)


@dataclass(frozen=True)
class PartDigest:
    """The record of one part of the model after one step."""

    MAGIC: ClassVar[bytes] = b"hpctprt\0"
    _BODY: ClassVar[struct.Struct] = struct.Struct("<QQQQHH")

    step: int
    part: int
    weights: int
    optimizer: int
    attempt: int = 0
    ranks: int = 1

    def differences(self, other: PartDigest) -> list[str]:
        """Return ``weights`` and ``optimizer state`` if they differ."""
        names = [] if self.weights == other.weights else ["weights"]
        return names if self.optimizer == other.optimizer else [*names, "optimizer state"]

    @property
    def place(self) -> tuple[int, int]:
        """The order of records in the file."""
        return self.step, self.part

    @property
    def body(self) -> bytes:
        """The record without its check."""
        numbers = (self.part, self.weights, self.optimizer, self.attempt & 0xFFFF, self.ranks & 0xFFFF)
        return self._BODY.pack(self.step, *numbers)

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        """Return the digest of a record without its check."""
        return cls(*cls._BODY.unpack(body))


Digest = TypeVar("Digest", StepDigest, PartDigest)


def encoded(record: _Record) -> bytes:
    """Return a record with its check."""
    body = record.body
    return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def same_bits(first: float | None, second: float | None) -> bool:
    """Return True if two numbers are bitwise identical, or both are NaN, or both are missing."""
    if first is None or second is None:
        return first is second
    return struct.pack("<d", _plain(first)) == struct.pack("<d", _plain(second))


def _plain(number: float) -> float:
    """Return the number with one bit pattern for all NaN, whose sign and payload depend on the hardware."""
    return math.nan if math.isnan(number) else number


def _decoded(record: bytes, kind: type[Record]) -> Record | None:
    body = record[: -_CHECK.size]
    if len(record) < RECORD_BYTES or _CHECK.unpack(record[-_CHECK.size :])[0] != xxhash.xxh32_intdigest(body):
        return None
    return kind.decoded(body)


def read_digests(path: Path, first: int = 0, last: int = MAX_STEP) -> Iterator[StepDigest]:
    """Yield the digests of the steps ``first`` to ``last`` in order; none if there is no file.

    Damaged records are omitted. Raises BadFileError if a later version wrote the file.
    """
    return _read(path, first, last, StepDigest)


def read_parts(path: Path) -> Iterator[tuple[int, dict[int, PartDigest]]]:
    """Yield step and digests by part, as ``read_digests`` does."""
    for step, digests in groupby(_read(path, 0, MAX_STEP, PartDigest), key=lambda digest: digest.step):
        yield step, {digest.part: digest for digest in digests}


def _read(path: Path, first: int, last: int, kind: type[Record]) -> Iterator[Record]:
    try:
        file = open_regular(path)
    except (FileNotFoundError, UnreadableFileError):
        return
    with file:
        if _has_header(file, path, kind):
            _go_to(file, first, kind)
            for digest in _records(file, kind):
                if digest.step > last:
                    return
                if digest.step >= first:
                    yield digest


def _has_header(file: BinaryIO, path: Path, kind: type[_Record]) -> bool:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, version, size = _HEADER.unpack(header)
    if magic == kind.MAGIC and version > VERSION:
        raise BadFileError(
            f"{path}: has version {version} and this hpc-train reads {VERSION}; use a newer one"
        )
    return bool(magic == kind.MAGIC and version == VERSION and size == RECORD_BYTES)


def _go_to(file: BinaryIO, step: int, kind: type[_Record]) -> None:
    """Seek to a record before ``step``, or to the first, by bisection; a damaged record ends it early."""
    low, high = 0, (file.seek(0, os.SEEK_END) - _HEADER.size) // RECORD_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        file.seek(_HEADER.size + middle * RECORD_BYTES)
        digest = _decoded(file.read(RECORD_BYTES), kind)
        if digest is None:
            break
        low, high = (middle, high) if digest.step < step else (low, middle)
    file.seek(_HEADER.size + low * RECORD_BYTES)


def _records(file: BinaryIO, kind: type[Record]) -> Iterator[Record]:
    """Yield the intact records from here on, as long as their steps and parts rise."""
    newest = (-1, 0)
    while block := file.read(RECORD_BYTES * _RECORDS_AT_A_TIME):
        for begin in range(0, len(block), RECORD_BYTES):
            digest = _decoded(block[begin : begin + RECORD_BYTES], kind)
            if digest is not None and digest.place > newest:
                newest = digest.place
                yield digest


def copy_records(old: Path, new: Path, last_step: int, kind: type[Digest], attempt: int) -> None:
    """Copy the records up to ``last_step``, as those of ``attempt``, to a new file, and sync it to the disk.

    Does nothing without an old file. Raises as ``read_digests``.
    """
    if not old.exists():
        return
    with new.open("wb") as file:
        file.write(_HEADER.pack(kind.MAGIC, VERSION, RECORD_BYTES))
        for digest in _read(old, 0, last_step, kind):
            file.write(encoded(replace(digest, attempt=attempt)))
        file.flush()
        sync_file(file.fileno())


class DigestWriter(Protocol[Record_contra]):
    """Receives the digests of all ranks: ``RecordsFile``."""

    def append(self, digests: Sequence[Record_contra]) -> None:
        """Write the digests of consecutive steps."""

    def sync(self) -> None:
        """Sync the written digests to the disk. Any thread."""


class RecordsFile(GrowingFile, Generic[Record]):
    """The records up to the step from which this attempt continues, followed by this attempt's records."""

    def __init__(self, path: Path, resumed_step: int, kind: type[Record]) -> None:
        self._resumed_step, self._kind = resumed_step, kind
        self._newest = (0, 0)
        super().__init__(path)
        if self._end == 0:
            self.write(_HEADER.pack(kind.MAGIC, VERSION, RECORD_BYTES))

    @override
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        if not _has_header(old, self._path, self._kind):
            return
        new.write(_HEADER.pack(self._kind.MAGIC, VERSION, RECORD_BYTES))
        for digest in _records(old, self._kind):
            if digest.step > self._resumed_step:
                return
            self._newest = digest.place
            new.write(encoded(digest))

    def append(self, digests: Sequence[Record]) -> None:
        """Write the records of consecutive steps to the operating system."""
        places = [digest.place for digest in digests]
        assert places == sorted(set(places)) and (not places or places[0] > self._newest), places
        self._newest = places[-1] if places else self._newest
        self.write(b"".join(encoded(digest) for digest in digests if digest.step <= MAX_STEP))


class DigestsFile(RecordsFile[StepDigest]):
    """``digests.bin``."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        super().__init__(path, resumed_step, StepDigest)


def module_of(tensor: str) -> str:
    """Return the module of a tensor of the state, such as ``optimizer.a.weight.exp_avg``: ``a``."""
    name = tensor.partition(".")[2]
    return (name.rpartition(".")[0] if tensor.startswith(_OPTIMIZER) else name).rpartition(".")[0]


def parts_of(tensors: Iterable[str]) -> dict[str, str]:
    """Return tensor → its part: its module or, of a model with over ``MAX_PARTS``, one that contains it."""
    paths = {tensor: module_of(tensor).split(".") for tensor in tensors}
    depth = max(map(len, paths.values()), default=0)
    while depth > 0 and len({tuple(path[:depth]) for path in paths.values()}) > MAX_PARTS:
        depth -= 1
    return {tensor: ".".join(path[:depth]) for tensor, path in paths.items()}


def part_digests(tensors: Mapping[str, str], rank: int) -> dict[str, tuple[int, int]]:
    """Return part → digests of its weights and optimizer state, of one rank; ranks' add up modulo 2^64."""
    content: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    parts = parts_of(tensors)
    for tensor in sorted(tensors):
        kind = tensor.startswith(_OPTIMIZER)
        content.setdefault((parts[tensor], kind), []).append((tensor, tensors[tensor]))
    digests = {
        key: xxhash.xxh3_64_intdigest(json.dumps(of_key).encode(), seed=rank)
        for key, of_key in content.items()
    }
    names = dict.fromkeys(parts.values())
    return {part: (digests.get((part, False), 0), digests.get((part, True), 0)) for part in names}


def part_id(part: str) -> int:
    """Return the number of a part in records."""
    return xxhash.xxh3_64_intdigest(part.encode())


def shard_digests(shard: Path) -> dict[str, str]:
    """Return the XXH3-64 of each tensor in a rank's shard, its pieces in order. Raises BadFileError."""
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
