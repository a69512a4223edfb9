"""``state.json``'s table of tensors, and a rank's reads of the parts that it needs.

The table is checked against the files and, by the caller, against the model before it is used: a forged table
must neither cause reads outside the checkpoint nor allocations larger than the files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpc_train.errors import BadFileError
from hpc_train.experiment.topology.degrees import AXES
from hpc_train.paths import CheckpointPaths
from hpc_train.run.checkpoints import Manifest, read_object
from hpc_train.run.file_shapes import is_a
from hpc_train.training.checkpoint.shards import DTYPES, ShardReader, open_shard
from hpc_train.training.strategies.base import Piece

Shape = tuple[int, ...]
#: Entries of a checkpoint besides the tensors that a resume reads.
_EXTRA = {
    "position": dict[str, Any],
    "skips": int,
    "seed": int,
    "data": dict[str, Any] | None,
    "versions": dict[str, str],
    "world_size": int,
    "strategy": str,
    "degrees": dict[str, int],
}
#: ``torch.amp.GradScaler.state_dict``; empty without a scaler.
_SCALER = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}
#: GradScaler keeps its tracker in 32 bits.
_MAX_TRACKER = 2**31
#: Entries of ``extra`` about the ranks that saved.
_RANKS = {"world_size", "strategy", "degrees"}
#: torch can't describe a larger tensor, even one without elements.
_MAX_ELEMENTS = 2**60


@dataclass(frozen=True)
class SavedPiece:
    """A piece of a tensor in shard ``rank``; ``number`` distinguishes the pieces within one shard."""

    rank: int
    offset: Shape
    shape: Shape
    number: int = 0

    def key(self, name: str) -> str:
        """Return the name that the piece of tensor ``name`` has in its shard."""
        # Unique, because torch allows no empty name between two dots.
        return f"{name}..{self.number}" if self.number else name

    def to_json(self) -> list[Any]:
        """Return its entry in ``state.json``: rank, offset, shape and, unless it is 0, number."""
        return [self.rank, self.offset, self.shape, *([self.number] if self.number else [])]


@dataclass(frozen=True)
class SavedTensor:
    """One global tensor; its pieces cover it exactly. ``dtype`` is safetensors' name."""

    dtype: str
    shape: Shape
    pieces: tuple[SavedPiece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's: ``BF16`` is ``torch.bfloat16``."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, all pieces together."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return its entry in the table of ``state.json``."""
        pieces = [piece.to_json() for piece in self.pieces]
        return {"dtype": self.dtype, "shape": self.shape, "pieces": pieces}


@dataclass(frozen=True)
class SavedState:
    """``state.json``, checked for consistency and against the manifest, not yet against a model."""

    tensors: dict[str, SavedTensor]
    #: Alias of a tensor → its name in the checkpoint.
    tied: dict[str, str]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    extra: dict[str, Any]

    def first_name(self, name: str) -> str:
        """Return the name of a tensor, which may be shared, in the checkpoint."""
        return self.tied.get(name, name)

    @classmethod
    def read(cls, checkpoint: CheckpointPaths) -> SavedState:
        """Raise BadFileError if the file contradicts itself or the manifest."""
        manifest, data = Manifest.read(checkpoint), read_object(checkpoint.state)
        try:
            tensors = {name: _tensor(entry) for name, entry in data["tensors"].items()}
            state = cls(tensors, *(_object(data[key]) for key in ("tied", "optimizer", "scaler", "extra")))
            _check_scaler(state.scaler)
            _check_extra(state.extra)
            _check_against_files(checkpoint, manifest, tensors)
            if not all(name in tensors for name in state.tied.values()):
                raise ValueError("tied names a tensor that does not exist")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFileError(f"{checkpoint.state} is not as hpc-train writes it: {error}") from error
        return state


def _check_scaler(scaler: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for a state that GradScaler would load but fail on later."""
    wrong = [key for key, kind in _SCALER.items() if not is_a(scaler.get(key), kind)]
    if scaler and wrong:
        raise TypeError(f"scaler.{wrong[0]} has the wrong type")
    if not 0 <= scaler.get("_growth_tracker", 0) < _MAX_TRACKER:
        raise ValueError("scaler._growth_tracker is out of range")


def _check_extra(extra: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if a value that a resume reads is invalid."""
    for key, kind in _EXTRA.items():
        if key in extra and not is_a(extra[key], kind):
            raise TypeError(f"extra.{key} has the wrong type")
    _shape([extra.get("skips", 0)])
    position = extra.get("position")
    if position is not None:
        _shape([position.get("step")])
        skipped = _shape(position.get("skipped"))
        if list(skipped) != sorted(set(skipped)):
            raise ValueError("extra.position.skipped is not sorted, or not unique")
    if extra.keys() & _RANKS and not extra.keys() >= _RANKS:
        raise ValueError("extra says only in part which ranks saved it")
    degrees = extra.get("degrees")
    if degrees is not None and (degrees.keys() != set(AXES) or min(degrees.values()) < 1):
        raise ValueError("extra.degrees is not one positive number per axis")
    data = extra.get("data")
    if data is not None and not (is_a(data.get("num_samples"), int) and is_a(data.get("classes"), str)):
        raise TypeError("extra.data has the wrong type")


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value


def _tensor(entry: dict[str, Any]) -> SavedTensor:
    pieces = tuple(_piece(*piece) for piece in entry["pieces"])
    tensor = SavedTensor(entry["dtype"], _shape(entry["shape"]), pieces)
    for shape in (tensor.shape, *(piece.shape for piece in pieces), *(piece.offset for piece in pieces)):
        if math.prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
            raise ValueError(f"shape {shape} is too large")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype {tensor.dtype!r} is unknown")
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(tensor.shape):
        raise ValueError(f"the pieces do not cover a tensor of shape {tensor.shape}")
    if len({piece.offset for piece in pieces}) != len(pieces):
        raise ValueError("two pieces have the same place")
    if len({(piece.rank, piece.number) for piece in pieces}) != len(pieces):
        raise ValueError("two pieces of a shard have the same number")
    for piece in pieces:
        ends = [begin + size for begin, size in zip(piece.offset, piece.shape, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"a piece reaches outside of a tensor of shape {tensor.shape}")
    return tensor


def _piece(rank: object, offset: object, shape: object, number: object = None) -> SavedPiece:
    """Read a piece: a shard's first piece of a tensor has no number, further pieces count from 1."""
    counted = 0 if number is None else _shape([number])[0]
    if number is not None and counted == 0:
        raise ValueError("a piece's number is 0")
    return SavedPiece(_shape([rank])[0], _shape(offset), _shape(shape), counted)


def _shape(value: object) -> Shape:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise TypeError(f"{value!r} is not a list of sizes")
    return tuple(value)


def _check_against_files(
    checkpoint: CheckpointPaths, manifest: Manifest, tensors: dict[str, SavedTensor]
) -> None:
    ranks = {piece.rank for tensor in tensors.values() for piece in tensor.pieces}
    shards = [checkpoint.shard(rank).name for rank in sorted(ranks)]
    unknown = [name for name in shards if name not in manifest.files]
    if unknown:
        raise ValueError(f"{unknown[0]} is not in the manifest")
    claimed = sum(tensor.nbytes for tensor in tensors.values())
    held = sum(manifest.files[name].size for name in shards)
    if claimed > held:
        raise ValueError(f"the tensors claim {claimed} bytes, the shards contain {held}")


def read_into(
    checkpoint: CheckpointPaths, saved: Mapping[str, SavedTensor], targets: Mapping[str, list[Piece]]
) -> None:
    """Copy into each target the overlapping parts of the saved tensor with its name.

    The caller has checked that shapes and dtypes agree. A shard without needed parts is not opened.
    """
    reads: dict[int, list[tuple[str, SavedPiece, Piece]]] = defaultdict(list)
    for name, pieces in targets.items():
        for target in pieces:
            for piece in saved[name].pieces:
                if target.local.numel() and _overlap(piece, target) is not None:
                    reads[piece.rank].append((name, piece, target))
    for rank in sorted(reads):
        with open_shard(checkpoint.shard(rank)) as shard, torch.no_grad():
            for name, piece, target in reads[rank]:
                _copy(shard, name, saved[name].dtype, piece, target)


def _copy(shard: ShardReader, name: str, dtype: str, piece: SavedPiece, target: Piece) -> None:
    overlap = _overlap(piece, target)
    assert overlap is not None
    source = tuple(slice(a - at, b - at) for (a, b), at in zip(overlap, piece.offset, strict=True))
    place = tuple(slice(a - at, b - at) for (a, b), at in zip(overlap, target.offset, strict=True))
    shard.read_into(target.local[place], piece.key(name), dtype, piece.shape, source)


def _overlap(piece: SavedPiece, target: Piece) -> list[tuple[int, int]] | None:
    """Return start and end of the overlap, per dimension of the global tensor; None if there is none."""
    spans = []
    rows = zip(piece.offset, piece.shape, target.offset, target.local.shape, strict=True)
    for saved_at, saved_size, at, size in rows:
        begin, end = max(saved_at, at), min(saved_at + saved_size, at + size)
        if begin >= end:
            return None
        spans.append((begin, end))
    return spans
