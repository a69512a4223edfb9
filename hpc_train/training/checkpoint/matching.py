"""Checks that a checkpoint fits the model and optimizer, and divides its tensors among the ranks that write.

``checkpoint.checkpointer`` calls it before it changes anything. If ranks own parts of the model or of each
parameter group, the union over all ranks must equal the checkpoint, and is the layout of a new one: each
stage of a pipeline owns its layers and reports them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpc_train.errors import BadFileError, HpcTrainError
from hpc_train.training.checkpoint.control_group import ControlGroup, digest
from hpc_train.training.checkpoint.saved_tensors import SavedPiece, SavedState, SavedTensor, Shape
from hpc_train.training.checkpoint.shards import DTYPE_NAMES, DTYPES
from hpc_train.training.checkpoint.staging import Contents, Kinds
from hpc_train.training.checkpoint.state import (
    DIFFERENT,
    EMA,
    MODEL,
    OPTIMIZER,
    NamedTensors,
    SavedGroup,
    TrainingState,
    checked_values,
    group_names,
    not_ours,
    saved_groups,
)

_SHOWN = 5
_RESUME = "use the file that the run was started with"
#: Description of a mismatch → the tensors; empty if the description is complete. Sent by each rank as JSON.
Mismatches = dict[str, list[str]]


@dataclass(frozen=True)
class LocalState:
    """The tensors and parameter groups of this rank, by the model's names."""

    named: NamedTensors
    averages: dict[str, Tensor]
    groups: list[list[str]]

    @classmethod
    def of(cls, state: TrainingState) -> LocalState:
        """Name the tensors themselves, not copies. Raises BadFileError like ``NamedTensors.of``."""
        named = NamedTensors.of(state.model)
        groups = group_names(state.optimizer, state.parameter_names(named))
        return cls(named, dict(state.averages), groups)

    @property
    def names(self) -> set[str]:
        """Return full names; an optimized parameter is listed again, as ``optimizer.<its name>``."""
        model = {MODEL + name for name in (*self.named.tensors, *self.named.tied)}
        return model | {EMA + name for name in self.averages} | {OPTIMIZER + name for name in self.optimized}

    @property
    def optimized(self) -> set[str]:
        """Names of the parameters in this rank's optimizer, over all groups."""
        return {name for group in self.groups for name in group}


def names_of(saved: SavedState) -> list[str]:
    """Return the names (see ``LocalState.names``) that the ranks together must own. Raises BadFileError."""
    held = {name for name in (*saved.tensors, *saved.tied) if name.startswith((MODEL, EMA))}
    return sorted(held | {OPTIMIZER + name for group in saved_groups(saved) for name in group.names})


def find_mismatches(held: LocalState, saved: SavedState, by_any: Collection[str]) -> Mismatches:
    """Return the mismatches on this rank. ``by_any``: the names from ``names_of`` that any rank owns.

    Raises BadFileError if the checkpoint contradicts itself.
    """
    return (
        _of_model(held.named, saved, by_any)
        or _of_groups(held, saved_groups(saved), by_any)
        or _of_optimizer(saved)
        or _of_averages(held, saved, by_any)
    )


def refuse(by_rank: Sequence[Mismatches]) -> None:
    """Raise BadFileError, the same on all ranks, if any rank has a mismatch."""
    together: Mismatches = {}
    for misfits in by_rank:
        for description, tensors in misfits.items():
            together.setdefault(description, []).extend(tensors)
    for description, tensors in together.items():
        lines = list(dict.fromkeys(tensors))
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise BadFileError(description + (": " if lines else "") + "; ".join(lines[:_SHOWN] + more))


def _listed(description: str, tensors: Iterable[str | None]) -> Mismatches:
    lines = [line for line in tensors if line]
    return {f"model: {description}; {_RESUME}": lines} if lines else {}


def _of_model(named: NamedTensors, saved: SavedState, by_any: Collection[str]) -> Mismatches:
    """The ranks together must own exactly the checkpoint's model tensors."""
    theirs = [*(name for name in saved.tensors if name.startswith(MODEL)), *saved.tied]
    ours = {name for name in by_any if name.startswith(MODEL)}
    problems = [_mismatch(MODEL + name, tensor, saved) for name, tensor in named.tensors.items()]
    problems += [f"{name} is not in the model" for name in theirs if name not in ours]
    problems += [
        f"{MODEL + name} is shared with {MODEL + first} in the model alone"
        for name, first in named.tied.items()
        if saved.first_name(MODEL + name) != saved.first_name(MODEL + first)
    ]
    return _listed("the model in the file is not the one in the checkpoint", problems)


def _mismatch(name: str, tensor: Tensor, saved: SavedState) -> str | None:
    entry = saved.tensors.get(saved.first_name(name))
    if entry is None:
        return f"{name} is missing in the checkpoint"
    theirs, ours = (
        f"{entry.dtype} {list(entry.shape)}",
        f"{DTYPE_NAMES.get(tensor.dtype)} {list(tensor.shape)}",
    )
    return None if theirs == ours else f"{name} is {theirs} in the checkpoint, {ours} in the model"


def _of_groups(held: LocalState, saved: Sequence[SavedGroup], by_any: Collection[str]) -> Mismatches:
    """The ranks together must optimize the checkpoint's parameters, in the same groups.

    A saved rank's groups and this rank's groups can be compared only in their common parameters. The order of
    groups is irrelevant, because their values come from the file.
    """
    listed = {name for group in saved for name in group.names}
    if (
        held.optimized <= listed
        and all(OPTIMIZER + name in by_any for name in listed)
        and all(_agrees(held, saved, rank) for rank in {group.rank for group in saved})
    ):
        return {}
    elsewhere = {name for name in listed - held.optimized if OPTIMIZER + name in by_any}
    sizes = [len(group) for group in held.groups]
    theirs = [size for group in saved if (size := len(set(group.names) - elsewhere))]
    return {
        "optimization.optimizer: its parameter groups are not the checkpoint's (parameters by group: "
        f"{sizes}, in the checkpoint {theirs}); {_RESUME}": []
    }


def _agrees(held: LocalState, saved: Sequence[SavedGroup], rank: int) -> bool:
    theirs = [group.names for group in saved if group.rank == rank]
    had = {name for names in theirs for name in names}
    return _common(theirs, held.optimized) == _common(held.groups, had)


def _common(groups: Iterable[Sequence[str]], names: set[str]) -> set[frozenset[str]]:
    return {common for group in groups if (common := frozenset(group) & names)}


def _of_optimizer(saved: SavedState) -> Mismatches:
    """The checkpoint's optimizer state must match its groups, and have all its tensors."""
    grouped = {name for group in saved_groups(saved) for name in group.names}
    listed = _state_names(saved)
    theirs = {name for name in saved.tensors if not name.startswith((MODEL, EMA))}
    problems = [f"{name} is not in the checkpoint's tensors" for name in sorted(listed - theirs)]
    problems += [f"{name} belongs to no parameter" for name in sorted(theirs - listed)]
    problems += [f"{name} is not optimised" for name in saved.optimizer["state"] if name not in grouped]
    return _listed("the optimizer's state in the checkpoint does not fit it", problems)


def _state_names(saved: SavedState) -> set[str]:
    """Return the full names of the optimizer's state tensors."""
    try:
        states = {
            name: (list(e["tensors"]), checked_values(e["values"]))
            for name, e in saved.optimizer["state"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_ours(error) from error
    return {f"{OPTIMIZER}{name}.{key}" for name, (keys, _) in states.items() for key in keys}


def _of_averages(held: LocalState, saved: SavedState, by_any: Collection[str]) -> Mismatches:
    """The ranks together must own exactly the checkpoint's EMA, or none if the checkpoint has none."""
    theirs = sorted(name for name in saved.tensors if name.startswith(EMA))
    if bool(theirs) != (bool(held.averages) or any(name in by_any for name in theirs)):
        has, has_not = ("checkpoint", "file") if theirs else ("file", "checkpoint")
        return {
            f"optimization.ema: the {has} has an average of the weights, the {has_not} none; {_RESUME}": []
        }
    problems = [_mismatch(EMA + name, tensor, saved) for name, tensor in held.averages.items()]
    problems += [f"{name} is not in the model" for name in theirs if name not in by_any]
    return _listed("the average in the checkpoint is not this model's", problems)


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
