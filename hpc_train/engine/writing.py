"""A staged checkpoint → files, hashes, and the rename that makes it count; and the thread that does it.

``engine.checkpoint`` calls it. All ranks write together and agree through ``engine.control_group``.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hpc_train.engine.control_group import ControlGroup
from hpc_train.engine.saved_tensors import SavedTensor
from hpc_train.engine.shards import Entry, write_safetensors
from hpc_train.engine.training_state import united
from hpc_train.errors import BadFileError, NonFiniteError, StorageError, UserError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run_folder.checkpoints import (
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    hash_file,
    move_away,
    newest_attempt,
    prune,
    read_object,
)
from hpc_train.run_folder.files import sync_folder, write_text
from hpc_train.run_folder.storage import retried, storage_error
from hpc_train.runtime import signals

#: For what stands beside the tensors, and the disk's own bookkeeping (assumed).
_SPARE_BYTES = 1 << 20

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Save:
    """A save that ended well, and what it took."""

    step: int
    #: From ``begin`` to the rename.
    duration_s: float
    #: What the thread that trains spent on it.
    stall_s: float


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory: this rank's part of the tensors, and everything that is no tensor."""

    step: int
    tensors: Mapping[str, Tensor]
    #: What this rank's shard will hold, and what all shards will hold together.
    table: Mapping[str, SavedTensor]
    total_nbytes: int
    #: Of ``tensors`` those that are parameters → their names: a checkpoint in which one is NaN or infinite
    #: would be for ever.
    parameters: Mapping[str, str]
    #: Rank 0's, and those parts of another rank's that are to be added; empty where none are.
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointWriter:
    """The checkpoints of one attempt as files, seen from one rank. ``write`` is collective over ``ranks``."""

    paths: RunPaths
    attempt: int
    ranks: ControlGroup
    keep: int
    #: Refusals to remove old checkpoints that the log has: each save meets them anew.
    _told: set[int | None] = field(default_factory=set)

    def write(self, staged: Staged, before_commit: Callable[[], None] | None = None) -> None:
        """Write and commit. Raises an error of the same kind on all ranks; then nothing is left."""
        name = f"step-{staged.step:08d}.tmp-{self.attempt}"
        temporary = CheckpointPaths(self.paths.checkpoints / name)
        try:
            self.together(temporary.folder, lambda: _refuse_non_finite(staged))
            self.together(temporary.folder, lambda: self._make_room(temporary, staged.total_nbytes))
            self.together(temporary.folder, lambda: self._write_shard(temporary, staged))
            if before_commit is not None:
                self.together(self.paths.folder, before_commit)
            self.together(temporary.folder, lambda: self._commit(temporary, staged))
        except Exception:
            if self.ranks.rank == 0:
                shutil.rmtree(temporary.folder, ignore_errors=True)
            raise

    def together(self, folder: Path, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank; a refusal of the disk becomes an error that names ``folder``."""

        def named_errors() -> Result:
            try:
                return work()
            except (OSError, BadFileError) as error:
                self.refuse_if_fenced()  # the later attempt has removed what this one wrote
                if isinstance(error, OSError):
                    raise storage_error(error, folder) from error
                raise

        return self.ranks.together(named_errors)

    def refuse_if_fenced(self) -> None:
        """Raise UserError where a later attempt owns the run: this one commits and removes nothing more."""
        owner = newest_attempt(self.paths)
        if owner > self.attempt:
            raise UserError(
                f"attempt {owner} goes on with this run; attempt {self.attempt} saves nothing more"
            )

    def _make_room(self, temporary: CheckpointPaths, nbytes: int) -> None:
        if self.ranks.rank != 0:
            return
        self.refuse_if_fenced()
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
        """Write this rank's shard, again from the start where a file server did not take it."""
        retried(lambda: self._try_shard(temporary, staged), temporary.shard(self.ranks.rank))

    def _try_shard(self, temporary: CheckpointPaths, staged: Staged) -> None:
        temporary.folder.mkdir(exist_ok=True)
        rank = self.ranks.rank
        # A file anew: what an fsync failed to write, the next one on the same file takes for written.
        temporary.shard(rank).unlink(missing_ok=True)
        entries = {name: Entry.of(tensor) for name, tensor in staged.tensors.items()}
        file = write_safetensors(temporary.shard(rank), entries, {"step": str(staged.step)})
        index = {
            "file": file.to_json(),
            "tensors": {name: entry.to_json() for name, entry in staged.table.items()},
            "rest": staged.rest if rank else {},
        }
        write_text(temporary.shard_index(rank), json.dumps(index))

    def _commit(self, temporary: CheckpointPaths, staged: Staged) -> None:
        """Turn the shards, all on the disk by now, into a checkpoint. Rank 0 alone does something."""
        if self.ranks.rank != 0:
            return
        files, tensors, others = self._merge_indices(temporary)
        rest = united({0: staged.rest, **others}, tensors)
        state = {"version": FORMAT_VERSION, "step": staged.step, "tensors": tensors, **rest}
        write_text(temporary.state, json.dumps(state, allow_nan=False), sync=True)
        files[temporary.state.name] = FileEntry(temporary.state.stat().st_size, hash_file(temporary.state))
        Manifest(staged.step, self.attempt, self.ranks.world_size, files).write(temporary)
        self.refuse_if_fenced()
        folder = self.paths.checkpoint(staged.step).folder
        if folder.exists():
            move_away(folder)
        temporary.folder.rename(folder)
        sync_folder(self.paths.checkpoints)

    def _merge_indices(
        self, temporary: CheckpointPaths
    ) -> tuple[dict[str, FileEntry], dict[str, dict[str, Any]], dict[int, dict[str, Any]]]:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, dict[str, Any]] = {}
        others: dict[int, dict[str, Any]] = {}
        for rank in range(self.ranks.world_size):
            index = read_object(temporary.shard_index(rank))
            files[temporary.shard(rank).name] = FileEntry.from_json(index["file"])
            for name, entry in index["tensors"].items():
                merged = tensors.setdefault(name, {**entry, "pieces": []})
                merged["pieces"] += entry["pieces"]
            if index["rest"]:
                others[rank] = index["rest"]
            temporary.shard_index(rank).unlink()
        return files, tensors, others

    def clear_up(self) -> None:
        """Remove what is not kept. Rank 0 alone does something; never raises, what was saved counts."""
        if self.ranks.rank != 0:
            return
        try:
            prune(self.paths, self.keep, self.attempt)
        except OSError as error:  # the next save tries again
            if error.errno not in self._told:
                self._told.add(error.errno)
                _log.warning("old checkpoints could not be removed (%s); each save tries again", error)


def _refuse_non_finite(staged: Staged) -> None:
    for key, name in staged.parameters.items():
        tensor = staged.tensors[key]
        if tensor.is_floating_point() and tensor.numel():
            least, greatest = tensor.aminmax()  # NaN shows in both
            if not (least.isfinite() and greatest.isfinite()):
                raise NonFiniteError(
                    f"a weight is NaN or infinite after step {staged.step} ({name}), which is not saved; "
                    "lower the learning rate, clip gradients, or use bf16 or fp32"
                )


@dataclass
class UnderWay:
    """One save that a thread of its own carries out: it has ended once ``write`` has; then ``clear_up``."""

    step: int
    began_at: float
    write: Callable[[], None]
    clear_up: Callable[[], None]
    stall_s: float = 0.0
    error: BaseException | None = None
    _committed_at: float = 0.0
    _written: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        signals.block()  # they are for the thread that trains
        try:
            self.write()
            self._committed_at = time.monotonic()
        except BaseException as error:
            self.error = error
        self._written.set()
        if self.error is None:
            self.clear_up()

    @property
    def has_ended(self) -> bool:
        return self._written.is_set()

    def wait(self) -> None:
        """Return once it ended, well or not."""
        self._written.wait()

    def wait_cleared(self) -> None:
        """Return once nothing of it goes on."""
        self._thread.join()

    def result(self) -> Save:
        """Return what it took, or raise its error. After it ended."""
        if self.error is not None:
            raise self.error
        return Save(self.step, self._committed_at - self.began_at, self.stall_s)
