"""Saves a run's checkpoints asynchronously, and loads them on all ranks.

``begin`` copies the training state at a step boundary (``checkpoint.staging``); a thread writes and commits
it (``checkpoint.writing``). Only the final rename makes a checkpoint valid; until then, and after any
failure, older checkpoints are unchanged. Every rank creates one ``Checkpointer``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from hpc_train.errors import BadFileError, HpcTrainError, StorageError, TransientStorageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.rank import signals
from hpc_train.run.checkpoints import all_set_aside, committed, damaged, set_aside, verify
from hpc_train.training.checkpoint import matching
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.checkpoint.matching import Layout, agree
from hpc_train.training.checkpoint.saved_tensors import SavedState, read_into
from hpc_train.training.checkpoint.staging import Contents, Staging
from hpc_train.training.checkpoint.state import (
    DIFFERENT,
    NamedTensors,
    NewOptimizerState,
    TensorRef,
    TrainingState,
)
from hpc_train.training.checkpoint.writing import CheckpointWriter, Staged, UnderWay, lower_priority
from hpc_train.training.checkpoint.writing import Save as Save
from hpc_train.training.strategies.base import Piece, Strategy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The step and JSON entries of a loaded checkpoint."""

    step: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """A checkpoint that fits this model: the parts that have been read, in separate memory."""

    saved: SavedState
    optimizer: NewOptimizerState
    named: NamedTensors


class Checkpointer:
    """The checkpoints of one attempt, on one rank.

    For the training thread. All ranks call the same methods in the same order, except for the properties,
    ``wait_staged`` and ``collect``, which are local.

    ``group`` has a CPU backend, on which training may run collectives at the same time; None for a single
    rank.
    """

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        strategy: Strategy,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        *,
        keep: int = 3,
        keep_every: int | None = None,
    ) -> None:
        self.paths = paths
        self.attempt = attempt
        self.strategy = strategy
        self.ranks = ControlGroup(rank, world_size, group)
        self._writer = CheckpointWriter(paths, attempt, self.ranks, keep, keep_every)
        self._layout: Layout | None = None
        self._staging: Staging | None = None
        self._under_way: UnderWay | None = None
        #: The previous save, whose thread may still be removing old checkpoints.
        self._clearing: UnderWay | None = None
        self._ended: list[Save] = []

    def reserve(self, state: TrainingState) -> None:
        """Allocate the buffers of asynchronous saves, so that the first save does not wait for it.

        Call it once the optimizer state exists: after an attempt's first step, or after a load.
        """
        self._end_earlier()
        contents = Contents.of(state, self.strategy, {})
        self._find_layout(contents)
        assert self._layout is not None
        self._staging = Staging(self._layout.sources(contents))

    def save(self, state: TrainingState, step: int, extra: Mapping[str, Any]) -> Save:
        """Save as ``step`` and wait for it; ``extra`` is JSON and is returned by ``load_newest``.

        The model's buffers must be equal on all ranks. Raises, on all ranks, the errors of ``finish``.
        """
        self.begin(state, step, extra)
        saved = self.finish()
        self.close()
        assert saved is not None
        return saved

    def begin(
        self,
        state: TrainingState,
        step: int,
        extra: Mapping[str, Any],
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Start an asynchronous save as ``step``.

        Forward and backward may continue at once, the optimizer after ``wait_staged``. An earlier save is
        finished first, and its error raised. ``before_commit`` is called in the writing thread, on every
        rank.
        """
        self._end_earlier()
        began_at = time.monotonic()
        contents = Contents.of(state, self.strategy, extra)
        is_checked = self._find_layout(contents)
        layout = self._layout
        assert layout is not None
        sources = layout.sources(contents)
        staging = self._staging = self._staging or Staging(sources)
        staging.begin(sources, layout.names_of(contents.buffers))

        def write() -> None:
            tensors = staging.copy()
            lower_priority()  # not earlier, because the optimizer waits for the copy
            if not is_checked:
                self._meet(layout.digest)
            parameters = layout.names_of(contents.parameters)
            rest = self._local_entries(contents, layout)
            staged = Staged(step, tensors, layout.table, layout.total_nbytes, parameters, rest)
            self._writer.write(staged, before_commit)

        self._under_way = UnderWay(step, began_at, write, self._writer.clear_up)
        self._under_way.stall_s = time.monotonic() - began_at

    def wait_staged(self) -> None:
        """Wait until the optimizer may change the tensors being saved; without a copy return at once."""
        if self._under_way is not None and self._staging is not None:
            began_at = time.monotonic()
            self._staging.wait()
            self._under_way.stall_s += time.monotonic() - began_at

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the current save has failed; ``finish`` raises the error everywhere."""
        return self._under_way is not None and self._under_way.error is not None

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress. A failed save is not."""
        return self._under_way is not None and not self._under_way.has_ended.is_set()

    def collect(self) -> Save | None:
        """Return the earliest save that has completed since the last call; None if there is none."""
        if self._under_way is not None and self._under_way.has_ended.is_set() and not self.has_failed:
            self._ended.append(self._under_way.result())
            self._clearing, self._under_way = self._under_way, None
        return self._ended.pop(0) if self._ended else None

    def finish(self) -> Save | None:
        """Wait until the current save is committed, and return it; raise its error on all ranks.

        After an error the next save may start. Returns None if no save is in progress.
        """
        under_way, began_at = self._under_way, time.monotonic()
        if under_way is None:
            return None
        under_way.has_ended.wait()
        under_way.stall_s += time.monotonic() - began_at
        self._clearing, self._under_way = under_way, None
        if under_way.error is not None:
            self._layout = None  # the ranks may differ, so they must agree on a new layout
        return under_way.result()

    def close(self) -> None:
        """Wait until obsolete checkpoints are removed. After ``finish``."""
        if self._clearing is not None:
            self._clearing.thread.join()
            self._clearing = None

    def clear_up(self) -> None:
        """Remove obsolete checkpoints, after ``close`` at the end of a run.

        Otherwise they remain if an attempt was stopped during a removal and the last attempt saves nothing.
        """
        self._writer.clear_up()

    def _end_earlier(self) -> None:
        """Finish the current save, and record it for ``collect``."""
        saved = self.finish()
        if saved is not None:
            self._ended.append(saved)
        self.close()

    def _find_layout(self, contents: Contents) -> bool:
        """Reuse the layout of the last save if it still fits, else agree on a new layout.

        Returns False if the ranks must still check that they save the same tensors.
        """
        kinds = contents.kinds()
        if self._layout is not None and self._layout.kinds == kinds:
            return False
        self._layout, self._staging = None, None
        self._meet(None)
        self._layout = agree(self.ranks, contents, kinds)
        return True

    def _meet(self, layout: int | None) -> None:
        """Raise on all ranks if their layouts, identified by digests, differ. None: no layout yet.

        This is the first message of each save, so that messages of different saves can't be mixed up.
        """
        number = -1 if layout is None else layout
        least, most = self.ranks.smallest([number, -number])
        if least != -most:
            raise HpcTrainError(DIFFERENT)

    def _local_entries(self, contents: Contents, layout: Layout) -> Mapping[str, Any]:
        """Return this rank's part of everything that is not a tensor."""
        if self.ranks.rank == 0:
            return contents.rest
        return {key: contents.rest[key] for key in ("tied", "optimizer")} if layout.describes else {}

    def load_newest(self, state: TrainingState) -> Loaded | None:
        """Load the newest valid and intact checkpoint; return None if no checkpoint was saved.

        Damaged checkpoints are set aside, each with a warning. Raises, on every rank, StorageError if all are
        damaged or were set aside earlier, and BadFileError if the checkpoint belongs to another model or
        optimizer.
        """
        for step in self._candidates():
            checkpoint = self.paths.checkpoint(step)
            read, damage = self._read_and_verify(checkpoint, state)
            if damage is None:
                return self._take(checkpoint, read, state)
            self._writer.together(checkpoint.folder, partial(self._set_aside, checkpoint, damage))
        self._writer.together(self.paths.checkpoints, self._refuse_to_start_over)
        return None

    def load(self, step: int, state: TrainingState) -> Loaded:
        """Load the checkpoint of ``step``, of this run or another; changes nothing on disk.

        Raises, on every rank, StorageError if it is damaged or was removed, and BadFileError if it belongs to
        another model or optimizer.
        """
        checkpoint = self.paths.checkpoint(step)
        read, damage = self._read_and_verify(checkpoint, state)
        if damage is not None and not checkpoint.folder.exists():
            raise StorageError(
                f"{checkpoint.folder} has been removed, as a run that trains does with old ones; try again"
            )
        if damage is not None:
            raise StorageError(f"{checkpoint.folder} is damaged: {damage}")
        return self._take(checkpoint, read, state)

    def _read_and_verify(
        self, checkpoint: CheckpointPaths, state: TrainingState
    ) -> tuple[_Read | HpcTrainError, str | None]:
        """Return the parts that were read, and the damage on any rank, None if it is intact. Collective."""
        # Hashing takes about as long as reading, so both run concurrently. ``state`` is not changed
        # meanwhile.
        with ThreadPoolExecutor(1, initializer=signals.block) as beside:
            problems = beside.submit(verify, checkpoint, self.ranks.rank, self.ranks.world_size)
            read = self._read(checkpoint, state)
            own_problems = self._writer.together(checkpoint.folder, problems.result)
        first = self.ranks.first_text("; ".join(own_problems) if own_problems else None)
        return read, None if first is None else first[1]

    def _refuse_to_start_over(self) -> None:
        """Raise StorageError on rank 0 if all remaining checkpoints were set aside."""
        bad = all_set_aside(self.paths) if self.ranks.rank == 0 else {}
        if bad:
            raise StorageError(
                "every checkpoint is damaged, and training does not silently start again; start again with "
                "hpc-train submit --new, or repair one, remove .bad from its name and resume. In "
                f"{self.paths.checkpoints}: " + "; ".join(f"{name} ({why})" for name, why in bad.items())
            )

    def _candidates(self) -> list[int]:
        """Return the steps to try, as listed by rank 0: other ranks may list the folder differently."""

        def look() -> list[int]:
            if self.ranks.rank != 0:
                return []
            for checkpoint, why in damaged(self.paths).items():
                self._set_aside(checkpoint, why)
            return [checkpoint.step for checkpoint in committed(self.paths, self.attempt)]

        return self.ranks.broadcast(self._writer.together(self.paths.checkpoints, look))

    def _set_aside(self, checkpoint: CheckpointPaths, why: str) -> None:
        """Rename a damaged checkpoint, with a warning. Only rank 0 acts."""
        if self.ranks.rank == 0 and (target := set_aside(checkpoint, why)) is not None:
            why = why.replace("\n", " ")
            _log.warning("checkpoint %s is damaged, now %s: %s", checkpoint.folder.name, target.name, why)

    def _read(self, checkpoint: CheckpointPaths, state: TrainingState) -> _Read | HpcTrainError:
        """Read the optimizer's state into separate memory, or return the error that prevents it.

        The error may be a consequence of damage.
        """
        together = partial(self._writer.together, checkpoint.folder)
        try:
            saved = together(lambda: SavedState.read(checkpoint))
            held = together(lambda: matching.LocalState.of(state))
            by_any = self._held_by_any(held.names, together(lambda: matching.names_of(saved)))
            misfits = together(lambda: matching.find_mismatches(held, saved, by_any))
            matching.refuse([json.loads(text) for text in self.ranks.texts(json.dumps(misfits))])
            return together(lambda: self._read_optimizer(checkpoint, saved, held.named, state))
        except (BadFileError, StorageError, TransientStorageError) as error:
            return error

    def _read_optimizer(
        self, checkpoint: CheckpointPaths, saved: SavedState, named: NamedTensors, state: TrainingState
    ) -> _Read:
        """Not collective."""
        names = state.parameter_names(named)
        new_state = NewOptimizerState.make(state.optimizer, names, saved, self.strategy.empty_like)
        read_into(checkpoint, saved.tensors, self._targets(saved, new_state.tensors))
        return _Read(saved, new_state, named)

    def _take(self, checkpoint: CheckpointPaths, read: _Read | HpcTrainError, state: TrainingState) -> Loaded:
        """Load the intact checkpoint into ``state``. Collective."""
        if isinstance(read, HpcTrainError):
            raise read
        weights = state.weights(read.named)

        def take() -> None:
            read_into(checkpoint, read.saved.tensors, self._targets(read.saved, weights))
            read.optimizer.give(state.optimizer)
            if state.scaler is not None and state.scaler.is_enabled() and read.saved.scaler:
                state.scaler.load_state_dict(read.saved.scaler)

        self._writer.together(checkpoint.folder, take)
        return Loaded(checkpoint.step, read.saved.extra)

    def _targets(self, saved: SavedState, tensors: Mapping[str, TensorRef]) -> dict[str, list[Piece]]:
        """Return this rank's pieces of ``tensors`` by their names in the checkpoint."""
        targets: dict[str, list[Piece]] = {}
        for name, ref in tensors.items():
            pieces = self.strategy.pieces(ref.tensor, ref.like)
            targets.setdefault(saved.first_name(name), []).extend(pieces)
        return targets

    def _held_by_any(self, held: Collection[str], names: Sequence[str]) -> set[str]:
        """Return the ``names`` that any rank owns, the same on all ranks. Collective."""
        is_held = [name in held for name in names]
        if self.ranks.smallest([all(is_held)])[0]:
            return set(names)
        return {name for name, holders in zip(names, self.ranks.total(is_held), strict=True) if holders}
