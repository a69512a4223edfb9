"""A run's checkpoints, written and read by all ranks together.

``Checkpointer.save`` is ``stage`` (tensors → CPU, at a step's boundary) and ``write`` (files, hashes,
commit). Only ``write``'s last rename makes a checkpoint; until then, and if anything fails, the older ones
are untouched. The worker makes one on every rank.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.engine.control_group import ControlGroup
from hpc_train.engine.saved_tensors import SavedPiece, SavedState, SavedTensor, read_into
from hpc_train.engine.shards import Entry, dtype_name, storage_error, write_safetensors
from hpc_train.engine.training_state import (
    MODEL,
    NamedTensors,
    TrainingState,
    check_model,
    check_optimizer,
    describe_optimizer,
    make_optimizer_state,
    optimizer_tensors,
)
from hpc_train.errors import HpcTrainError, StorageError, UserError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run_folder.checkpoints import (
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    committed,
    damaged,
    hash_file,
    move_away,
    newest_attempt,
    prune,
    read_object,
    set_aside,
    verify,
)
from hpc_train.run_folder.files import sync_folder, write_text
from hpc_train.strategies.base import Piece, Strategy

#: For what stands beside the tensors, and the disk's own bookkeeping (assumed).
_SPARE_BYTES = 1 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory: this rank's part of the tensors, copied, and everything that is no tensor."""

    step: int
    tensors: dict[str, Tensor]
    #: What this rank's shard will hold.
    table: dict[str, SavedTensor]
    rest: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint brought back besides the tensors."""

    step: int
    extra: dict[str, Any]


class Checkpointer:
    """The checkpoints of one attempt, seen from one rank. Collective, unless said, over the control group.

    ``control_group`` is of a CPU backend; None for one rank. ``notices`` says, on rank 0, what was found
    wrong on the disk, for the trainer to show.
    """

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        strategy: Strategy,
        rank: int = 0,
        world_size: int = 1,
        control_group: dist.ProcessGroup | None = None,
        *,
        keep: int = 3,
    ) -> None:
        self.paths = paths
        self.attempt = attempt
        self.strategy = strategy
        self.keep = keep
        self.ranks = ControlGroup(rank, world_size, control_group)
        self.notices: list[str] = []

    def save(self, state: TrainingState, step: int, extra: Mapping[str, Any]) -> None:
        """Save as ``step``; ``extra`` is JSON and comes back from ``load_newest``.

        The model's buffers must be alike on all ranks by now. Raises StorageError on every rank if one could
        not write.
        """
        self.write(self.stage(state, step, extra))

    def stage(self, state: TrainingState, step: int, extra: Mapping[str, Any]) -> Staged:
        """Copy to the CPU what this rank will write; training may go on afterwards."""
        named = NamedTensors.of(state.model)
        names = named.parameter_names()
        tensors = {MODEL + name: tensor for name, tensor in named.tensors.items()}
        tensors |= optimizer_tensors(state.optimizer, names)
        rest = {
            "tied": {MODEL + name: MODEL + first for name, first in named.tied.items()},
            "optimizer": describe_optimizer(state.optimizer, names),
            "scaler": state.scaler.state_dict() if state.scaler else {},
            "extra": dict(extra),
        }
        mine = self._mine({name: self.strategy.piece(tensor) for name, tensor in tensors.items()})
        table = {name: self._table_entry(name, piece) for name, piece in mine.items()}
        copies = {name: _copy_to_cpu(piece.local) for name, piece in mine.items()}
        return Staged(step, copies, table, rest)

    def _mine(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Choose what this rank writes: its own pieces, and its share of what every rank holds whole."""
        names = list(pieces)
        self._check_same(pieces)
        is_whole = [tuple(pieces[name].local.shape) == pieces[name].shape for name in names]
        shared = [name for name, whole in zip(names, self.ranks.smallest(is_whole), strict=True) if whole]
        writers = deal({name: pieces[name].local.nbytes for name in shared}, self.ranks.world_size)
        return {
            name: piece
            for name, piece in pieces.items()
            if (
                writers[name] == self.ranks.rank
                if name in writers
                else piece.is_writer and piece.local.numel() > 0
            )
        }

    def _check_same(self, pieces: dict[str, Piece]) -> None:
        kinds = [f"{name} {piece.shape} {piece.local.dtype}" for name, piece in pieces.items()]
        digest = int.from_bytes(hashlib.sha256("\n".join(kinds).encode()).digest()[:7])
        low, high = self.ranks.smallest([digest, -digest])
        if low != -high:
            raise HpcTrainError("the ranks' models or optimizers hold different tensors; nothing was saved")

    def _table_entry(self, name: str, piece: Piece) -> SavedTensor:
        here = SavedPiece(self.ranks.rank, piece.offset, tuple(piece.local.shape))
        return SavedTensor(dtype_name(name, piece.local.dtype), piece.shape, (here,))

    def write(self, staged: Staged) -> None:
        """Write and commit. Runs in any thread, as long as nobody else uses the control group meanwhile."""
        temporary = CheckpointPaths(self.paths.checkpoints / f"step-{staged.step:08d}.tmp-{self.attempt}")
        nbytes = self.ranks.total([sum(tensor.nbytes for tensor in staged.tensors.values())])[0]
        try:
            self._together(temporary.folder, lambda: self._make_room(temporary, nbytes))
            self._together(temporary.folder, lambda: self._write_shard(temporary, staged))
            self._together(temporary.folder, lambda: self._commit(temporary, staged))
        except Exception:
            if self.ranks.rank == 0:
                shutil.rmtree(temporary.folder, ignore_errors=True)
            raise

    def _together(self, folder: Path, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank; a refusal of the disk becomes a StorageError that names ``folder``."""

        def named_errors() -> Result:
            try:
                return work()
            except OSError as error:
                raise storage_error(error, folder) from error

        return self.ranks.together(named_errors)

    def _make_room(self, temporary: CheckpointPaths, nbytes: int) -> None:
        if self.ranks.rank == 0:
            self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
            if temporary.folder.exists():  # this attempt tried before and could not clear up
                shutil.rmtree(temporary.folder)
            free = shutil.disk_usage(self.paths.checkpoints).free
            if free < nbytes + _SPARE_BYTES:
                raise StorageError(
                    f"{temporary.folder}: the disk is full: {nbytes + _SPARE_BYTES} bytes are needed, "
                    f"{free} are free; make room there, then resume"
                )
            temporary.folder.mkdir()

    def _write_shard(self, temporary: CheckpointPaths, staged: Staged) -> None:
        temporary.folder.mkdir(exist_ok=True)
        rank = self.ranks.rank
        entries = {name: Entry.of(tensor) for name, tensor in staged.tensors.items()}
        file = write_safetensors(temporary.shard(rank), entries, {"step": str(staged.step)})
        index = {
            "size": file.size,
            "sha256": file.sha256,
            "tensors": {name: entry.to_json() for name, entry in staged.table.items()},
        }
        write_text(temporary.shard_index(rank), json.dumps(index))

    def _commit(self, temporary: CheckpointPaths, staged: Staged) -> None:
        """Turn the shards, all on the disk by now, into a checkpoint. Rank 0 alone does something."""
        if self.ranks.rank != 0:
            return
        files, tensors = self._merge_indices(temporary)
        state = {"version": FORMAT_VERSION, "step": staged.step, "tensors": tensors, **staged.rest}
        write_text(temporary.state, json.dumps(state, allow_nan=False), sync=True)
        files[temporary.state.name] = FileEntry(temporary.state.stat().st_size, hash_file(temporary.state))
        Manifest(staged.step, self.attempt, self.ranks.world_size, files).write(temporary)
        self._make_way(staged.step)
        temporary.folder.rename(self.paths.checkpoint(staged.step).folder)
        sync_folder(self.paths.checkpoints)
        self._clear_up()

    def _merge_indices(
        self, temporary: CheckpointPaths
    ) -> tuple[dict[str, FileEntry], dict[str, dict[str, Any]]]:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for rank in range(self.ranks.world_size):
            index = read_object(temporary.shard_index(rank))
            files[temporary.shard(rank).name] = FileEntry(index["size"], index["sha256"])
            for name, entry in index["tensors"].items():
                merged = tensors.setdefault(name, {**entry, "pieces": []})
                merged["pieces"] += entry["pieces"]
            temporary.shard_index(rank).unlink()
        return files, tensors

    def _make_way(self, step: int) -> None:
        """Move away a folder that has the name already.

        Raises UserError where a later attempt owns the run: this one then commits and removes nothing.
        """
        owner = newest_attempt(self.paths)
        if owner > self.attempt:
            raise UserError(
                f"attempt {owner} goes on with this run; attempt {self.attempt} saves nothing more"
            )
        folder = self.paths.checkpoint(step).folder
        if folder.exists():
            move_away(folder)

    def _clear_up(self) -> None:
        try:
            prune(self.paths, self.keep, self.attempt)
        except OSError as error:  # what was saved counts; the next save tries again
            self.notices.append(f"old checkpoints could not be removed: {error}")

    def load_newest(self, state: TrainingState) -> Loaded | None:
        """Bring back the newest checkpoint that counts and is whole; None where there is none.

        Damaged ones are set aside, with a notice each. Raises BadFileError, on every rank, where the
        checkpoint is of another model or optimizer.
        """
        for step in self._candidates():
            checkpoint = self.paths.checkpoint(step)
            if self._is_whole(checkpoint):
                return self._together(checkpoint.folder, partial(self._load, checkpoint, state))
        return None

    def _candidates(self) -> list[int]:
        """Return the steps to try, as rank 0 sees the folder: others may see it later or earlier."""

        def look() -> list[int]:
            if self.ranks.rank != 0:
                return []
            for checkpoint, why in damaged(self.paths).items():
                self._set_aside(checkpoint, why)
            return [checkpoint.step for checkpoint in committed(self.paths, self.attempt)]

        return self.ranks.broadcast(self._together(self.paths.checkpoints, look))

    def _is_whole(self, checkpoint: CheckpointPaths) -> bool:
        problems = verify(checkpoint, self.ranks.rank, self.ranks.world_size)
        found = self.ranks.first_text("; ".join(problems) if problems else None)
        if found is None:
            return True

        def aside() -> None:
            if self.ranks.rank == 0:
                self._set_aside(checkpoint, found[1])

        self._together(checkpoint.folder, aside)
        return False

    def _set_aside(self, checkpoint: CheckpointPaths, why: str) -> None:
        target = set_aside(checkpoint, why)
        self.notices.append(
            f"checkpoint {checkpoint.folder.name} is damaged, now {target.name}: {why}".replace("\n", " ")
        )

    def _load(self, checkpoint: CheckpointPaths, state: TrainingState) -> Loaded:
        saved = SavedState.read(checkpoint)
        named = NamedTensors.of(state.model)
        names = named.parameter_names()
        check_model(named, saved)
        check_optimizer(state.optimizer, names, saved)
        tensors = {MODEL + name: tensor for name, tensor in named.tensors.items()}
        tensors |= make_optimizer_state(state.optimizer, names, saved, self.strategy.empty_like)
        targets: dict[str, list[Piece]] = {}
        for name, tensor in tensors.items():
            targets.setdefault(saved.first_name(name), []).append(self.strategy.piece(tensor))
        read_into(checkpoint, saved.tensors, targets)
        if state.scaler is not None and state.scaler.is_enabled() and saved.scaler:
            state.scaler.load_state_dict(saved.scaler)
        return Loaded(checkpoint.step, saved.extra)


def deal(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Deal names out to ranks so that all get about as many bytes; the same on every rank."""
    load = [0] * world_size
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        owner[name] = rank
        load[rank] += sizes[name]
    return owner


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())
