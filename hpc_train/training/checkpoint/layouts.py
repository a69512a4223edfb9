"""The distribution of a checkpoint's tensors over the ranks that write them, which may own different tensors.

``checkpoint.checkpointer`` calls it. The layout is the union over ranks: each stage of a pipeline owns its
layers and reports them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpc_train.errors import HpcTrainError
from hpc_train.training.checkpoint.control_group import ControlGroup, digest
from hpc_train.training.checkpoint.saved_tensors import SavedPiece, SavedTensor, Shape
from hpc_train.training.checkpoint.shards import DTYPES
from hpc_train.training.checkpoint.staging import Contents, Kinds
from hpc_train.training.checkpoint.state import DIFFERENT


@dataclass(frozen=True)
class Layout:
    """The tensors that a rank writes, valid while names, shapes and dtypes of the tensors do not change."""

    kinds: Kinds
    #: Digest of the tensors of all ranks; equal on all ranks.
    digest: int
    #: The content of this rank's shard.
    table: dict[str, SavedTensor]
    #: Name in this rank's shard → the tensor's name, and the index of this rank's piece.
    keys: dict[str, tuple[str, int]]
    #: Sum over the shards of all ranks.
    total_nbytes: int
    #: Whether this rank, in addition to rank 0, reports its tensors, as the first of the ranks with these.
    describes: bool

    def sources(self, contents: Contents) -> dict[str, Tensor]:
        """Return the source tensors of this rank's shard, by name in the shard."""
        return {key: contents.pieces[name][index].local for key, (name, index) in self.keys.items()}

    def names_of(self, tensors: Iterable[str]) -> dict[str, str]:
        """Return name in this rank's shard → tensor name, restricted to ``tensors``."""
        chosen = frozenset(tensors)
        return {key: name for key, (name, _) in self.keys.items() if name in chosen}


@dataclass(frozen=True)
class _Global:
    """A tensor in the description of all its owners; ``dtype`` is safetensors' name."""

    dtype: str
    shape: Shape
    holders: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def agree(ranks: ControlGroup, contents: Contents, kinds: Kinds) -> Layout:
    """Assign to each rank its pieces, and a share of the tensors that several ranks own whole.

    Collective. If all ranks own the same tensors, no table is sent. Raises HpcTrainError, on all ranks, if
    ranks have different tensors with the same name.
    """
    texts = ranks.texts(ranks.together(contents.table))
    held = _union(texts)
    is_whole = ranks.smallest([name not in contents.pieces or contents.is_whole(name) for name in held])
    shared = [name for name, whole in zip(held, is_whole, strict=True) if whole]
    writers = deal(
        {name: held[name].nbytes for name in shared}, {name: held[name].holders for name in shared}
    )
    table, keys = _local_part(ranks.rank, contents, writers, held)
    nbytes = sum(contents.pieces[name][index].local.nbytes for name, index in keys.values())
    return Layout(
        kinds,
        digest("\n".join(dict.fromkeys(texts))),
        table,
        keys,
        total_nbytes=ranks.total([nbytes])[0],
        describes=texts.index(texts[ranks.rank]) == ranks.rank != 0,
    )


def _union(texts: Sequence[str]) -> dict[str, _Global]:
    """Return the union of the tensors that the ranks report, in the same order on every rank."""
    speakers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        speakers.setdefault(text, []).append(rank)
    tensors: dict[str, _Global] = {}
    for text, ranks in speakers.items():
        for name, dtype, shape in json.loads(text):
            previous = tensors.get(name, _Global(dtype, tuple(shape), ()))
            if (previous.dtype, previous.shape) != (dtype, tuple(shape)):
                raise HpcTrainError(DIFFERENT)
            holders = [*previous.holders, *ranks] if previous.holders else ranks
            tensors[name] = _Global(dtype, previous.shape, holders)
    return tensors


def _local_part(
    rank: int, contents: Contents, writers: Mapping[str, int], held: Mapping[str, _Global]
) -> tuple[dict[str, SavedTensor], dict[str, tuple[str, int]]]:
    """Return ``Layout.table`` and ``Layout.keys``."""
    table: dict[str, SavedTensor] = {}
    keys: dict[str, tuple[str, int]] = {}
    for name, pieces in contents.pieces.items():
        if name in writers:
            chosen = [0] if writers[name] == rank else []
        else:
            chosen = [at for at, piece in enumerate(pieces) if piece.is_writer and piece.local.numel()]
        saved = tuple(
            SavedPiece(rank, pieces[at].offset, tuple(pieces[at].local.shape), number)
            for number, at in enumerate(chosen)
        )
        if saved:
            table[name] = SavedTensor(held[name].dtype, held[name].shape, saved)
            keys |= {piece.key(name): (name, at) for piece, at in zip(saved, chosen, strict=True)}
    return table, keys


def deal(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Assign names to owners so that all ranks get about the same number of bytes. Deterministic."""
    load: dict[int, int] = defaultdict(int)
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(holders[name], key=load.__getitem__)
        owner[name] = rank
        load[rank] += sizes[name]
    return owner
