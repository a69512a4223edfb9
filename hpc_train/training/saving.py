"""The saves of one attempt for the loop: begun at a step's boundary, committed during later steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpc_train.training.checkpoint.checkpointer import Checkpointer, Save
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.meters import Meters


class Saves:
    """Every rank has one. ``extra``: step → the content of a checkpoint besides tensors.

    ``on_saved`` receives each committed save. Before a checkpoint is committed, the rows of metrics up to its
    step are synced to the disk.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: TrainingState,
        meters: Meters,
        extra: Callable[[int], dict[str, Any]],
        on_saved: Callable[[Save], None],
    ) -> None:
        self._checkpointer = checkpointer
        self._state = state
        self._meters = meters
        self._extra = extra
        self._on_saved = on_saved
        self._rows_are_written = threading.Event()
        self._rows_are_written.set()

    @property
    def has_failed(self) -> bool:
        """True if this rank's part of the save in progress has failed; ``finish`` raises on all ranks."""
        return self._checkpointer.has_failed

    @property
    def is_busy(self) -> bool:
        """True if a save is in progress and has not failed."""
        return self._checkpointer.is_busy

    def reserve(self) -> None:
        """Allocate the staging memory; called once the optimizer's state exists."""
        self._checkpointer.reserve(self._state)

    def begin(self, step: int) -> None:
        """Begin to save ``step``; an earlier save is finished first. Collective, at a step's boundary."""
        self.finish()
        self._rows_are_written.clear()
        self._checkpointer.begin(self._state, step, self._extra(step), before_commit=self._sync_rows)

    def wait_staged(self) -> None:
        """Wait until the weights may change again."""
        self._checkpointer.wait_staged()
        if not self._rows_are_written.is_set():
            self._meters.drain(wait=True)
            self._rows_are_written.set()

    def collect(self) -> None:
        """Report a save that has been committed meanwhile; never waits."""
        self._note_saved(self._checkpointer.collect())

    def finish(self) -> None:
        """Wait for the save in progress. Raises its error, of the same class on every rank."""
        self.wait_staged()
        self._note_saved(self._checkpointer.finish())

    def close(self) -> None:
        """Finish, and wait until old checkpoints are removed. At the end of the run, or before a rollback."""
        self.finish()
        self._checkpointer.close()
        self._checkpointer.clear_up()

    def _note_saved(self, save: Save | None) -> None:
        if save is not None:
            self._on_saved(save)

    def _sync_rows(self) -> None:
        """Sync the rows of metrics. Runs in the writer's thread."""
        self._rows_are_written.wait()
        self._meters.sync()
