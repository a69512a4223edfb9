"""Writes a staged checkpoint in a thread: files, hashes, and the rename that makes it valid.

``checkpoint.checkpointer`` calls it. All ranks write together and agree through ``checkpoint.control_group``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hpc_train.errors import FINITE_REMEDY, BadFileError, NonFiniteError, StorageError, UserError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.rank import signals
from hpc_train.run import checkpoints, evaluation_jobs, file_shapes, storage_errors
from hpc_train.run.best import BEST, Best
from hpc_train.run.files import free_space, sync_folder, write_text
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.checkpoint.saved_tensors import SavedTensor
from hpc_train.training.checkpoint.shards import Entry, write_safetensors
from hpc_train.training.checkpoint.staging import is_finite
from hpc_train.training.checkpoint.state import united

#: Added to the nice value of a thread that writes an asynchronous save, which then gets a tenth of a core
#: that training also uses.
_NICER = 10
#: For the files besides the tensors, and the file system's metadata (assumed).
_SPARE_BYTES = 1 << 20

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Save:
    """A completed save, and its cost."""

    step: int
    #: From ``begin`` to the rename.
    duration_s: float
    #: Time that the training thread was blocked.
    stall_s: float


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory: this rank's part of the tensors, and everything that is not a tensor."""

    step: int
    tensors: Mapping[str, Tensor]
    #: Content of this rank's shard, and of all shards together.
    table: Mapping[str, SavedTensor]
    total_nbytes: int
    #: Keys of ``tensors`` that are parameters → their names. NaN or infinity in a parameter would persist in
    #: all later checkpoints.
    parameters: Mapping[str, str]
    #: The other entries of rank 0, and the entries that another rank adds; empty if it adds none.
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointWriter:
    """The checkpoint files of one attempt, on one rank. ``write`` is collective over ``ranks``."""

    paths: RunPaths
    attempt: int
    ranks: ControlGroup
    keep: int
    keep_every: int | None = None
    #: Errors of removing old checkpoints that were already logged; they recur at each save.
    _warned_of: set[int | None] = field(default_factory=set)

    def write(self, staged: Staged, before_commit: Callable[[], None] | None = None) -> None:
        """Write and commit. Raises an error of the same class on all ranks; then no files remain."""
        name = f"step-{staged.step:08d}.tmp-{self.attempt}"
        temporary = CheckpointPaths(self.paths.checkpoints / name)
        try:
            self.together(temporary.folder, lambda: _refuse_non_finite(staged))
            self.together(temporary.folder, lambda: self._make_room(temporary, staged.total_nbytes))
            shard, write = temporary.shard(self.ranks.rank), partial(self._write_shard, temporary, staged)
            self.together(temporary.folder, lambda: storage_errors.retried(write, shard))
            if before_commit is not None:
                self.together(self.paths.folder, before_commit)
            self.together(temporary.folder, lambda: self._commit(temporary, staged))
        except Exception:
            if self.ranks.rank == 0:
                shutil.rmtree(temporary.folder, ignore_errors=True)
            raise

    def together(self, folder: Path, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank; a disk error becomes an error that names ``folder``."""

        def named_errors() -> Result:
            try:
                return work()
            except (OSError, BadFileError) as error:
                self.refuse_if_fenced()  # the later attempt has removed this attempt's files
                if isinstance(error, OSError):
                    raise storage_errors.storage_error(error, folder) from error
                raise

        return self.ranks.together(named_errors)

    def refuse_if_fenced(self) -> None:
        """Raise UserError if a later attempt owns the run; then this attempt commits and removes nothing."""
        owner = checkpoints.newest_attempt(self.paths)
        if owner > self.attempt:
            raise UserError(f"attempt {owner} continues this run; attempt {self.attempt} saves nothing more")

    def _make_room(self, temporary: CheckpointPaths, nbytes: int) -> None:
        if self.ranks.rank != 0:
            return
        self.refuse_if_fenced()
        self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
        if temporary.folder.exists():  # this attempt failed before and could not clean up
            shutil.rmtree(temporary.folder)
        free = free_space(self.paths.checkpoints)
        if free is not None and free < nbytes + _SPARE_BYTES:
            raise StorageError(
                f"{temporary.folder}: the disk is full: {nbytes + _SPARE_BYTES} bytes are needed, "
                f"{free} are free; make room there, then resume"
            )
        temporary.folder.mkdir()

    def _write_shard(self, temporary: CheckpointPaths, staged: Staged) -> None:
        temporary.folder.mkdir(exist_ok=True)
        rank = self.ranks.rank
        # A new file, because after a failed fsync the next fsync of the same file reports success.
        temporary.shard(rank).unlink(missing_ok=True)
        entries = {name: Entry.of(tensor) for name, tensor in staged.tensors.items()}
        file = write_safetensors(temporary.shard(rank), entries, {"step": str(staged.step)})
        index = {
            "file": file_shapes.encoded(file),
            "tensors": {name: entry.to_json() for name, entry in staged.table.items()},
            "rest": staged.rest if rank else {},
        }
        write_text(temporary.shard_index(rank), json.dumps(index))

    def _commit(self, temporary: CheckpointPaths, staged: Staged) -> None:
        """Make a checkpoint of the shards, which are all on disk. Only rank 0 acts."""
        if self.ranks.rank != 0:
            return
        files, tensors, others = self._merge_indices(temporary)
        rest = united({0: staged.rest, **others}, tensors)
        state = {"version": checkpoints.FORMAT_VERSION, "step": staged.step, "tensors": tensors, **rest}
        write_text(temporary.state, json.dumps(state, allow_nan=False), sync=True)
        files[temporary.state.name] = checkpoints.FileEntry(
            temporary.state.stat().st_size, checkpoints.hash_file(temporary.state)
        )
        extra = staged.rest.get("extra", {})
        best, verified = file_shapes.decoded(Best, extra.get(BEST)), extra.get(checkpoints.VERIFIED)
        checkpoints.Manifest(staged.step, self.attempt, self.ranks.world_size, files, best, verified).write(
            temporary
        )
        self.refuse_if_fenced()
        folder = self.paths.checkpoint(staged.step).folder
        if folder.exists():
            checkpoints.move_away(folder)
        temporary.folder.rename(folder)
        sync_folder(self.paths.checkpoints)

    def _merge_indices(
        self, temporary: CheckpointPaths
    ) -> tuple[dict[str, checkpoints.FileEntry], dict[str, dict[str, Any]], dict[int, dict[str, Any]]]:
        files: dict[str, checkpoints.FileEntry] = {}
        tensors: dict[str, dict[str, Any]] = {}
        others: dict[int, dict[str, Any]] = {}
        for rank in range(self.ranks.world_size):
            index = checkpoints.read_object(temporary.shard_index(rank))
            name = temporary.shard(rank).name
            files[name] = checkpoints.file_entry(temporary.shard_index(rank), name, index["file"])
            for name, entry in index["tensors"].items():
                merged = tensors.setdefault(name, {**entry, "pieces": []})
                merged["pieces"] += entry["pieces"]
            if index["rest"]:
                others[rank] = index["rest"]
            temporary.shard_index(rank).unlink()
        return files, tensors, others

    def clear_up(self) -> None:
        """Remove old checkpoints. Only rank 0 acts; never raises, because the save is valid."""
        if self.ranks.rank != 0:
            return
        try:
            needed = evaluation_jobs.unfinished(self.paths)
            checkpoints.prune(self.paths, self.keep, self.attempt, self.keep_every, needed)
        except OSError as error:  # the next save tries again
            if error.errno not in self._warned_of:
                self._warned_of.add(error.errno)
                _log.warning("old checkpoints could not be removed (%s); each save tries again", error)


def _refuse_non_finite(staged: Staged) -> None:
    for key, name in staged.parameters.items():
        if not is_finite(staged.tensors[key]):
            raise NonFiniteError(
                f"a weight is NaN or infinite after step {staged.step} ({name}), which is not saved; "
                + FINITE_REMEDY
            )


def lower_priority() -> None:
    """Lower the priority of the calling thread below training's threads, until it ends.

    Only on Linux, which has a priority per thread.
    """
    thread = threading.get_native_id()
    if sys.platform == "linux":
        with suppress(OSError):  # a system that forbids it
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, nice + _NICER)


@dataclass
class UnderWay:
    """One save in a separate thread. It has ended when ``write`` has; ``clear_up`` follows."""

    step: int
    began_at: float
    write: Callable[[], None]
    clear_up: Callable[[], None]
    stall_s: float = 0.0
    error: BaseException | None = None
    #: Set once the checkpoint is committed or the save has failed; ``clear_up`` may still be running.
    has_ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)
    _committed_at: float = 0.0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        signals.block()  # the training thread handles them
        try:
            self.write()
            self._committed_at = time.monotonic()
        except BaseException as error:
            self.error = error
        self.has_ended.set()
        if self.error is None:
            self.clear_up()

    def result(self) -> Save:
        """Return its result, or raise its error. After it ended."""
        if self.error is not None:
            raise self.error
        return Save(self.step, self._committed_at - self.began_at, self.stall_s)
