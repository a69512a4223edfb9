"""The training loop and its saves. ``training.build`` passes in what they use; the loop determines the order.

``step`` counts completed optimizer steps: the first step trained is step 0, after it ``step`` is 1. A save
begins at a step's boundary and is committed during later steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpc_train.errors import BadFileError, HpcTrainError, TryAgainError
from hpc_train.experiment.config.schema import CheckpointConfig, EvaluationConfig
from hpc_train.experiment.topology.batch_arithmetic import evaluation_interval, minutes_between_saves
from hpc_train.recovery.history import records
from hpc_train.recovery.save_interval import save_interval
from hpc_train.run.attempts import AttemptRecord, EventLog
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Save
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.datasets.batches import TrainingBatches
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement, Consensus, StepFlags
from hpc_train.training.evaluation import Evaluator, share_all_buffers
from hpc_train.training.forward import TrainingForward
from hpc_train.training.health.progress import Progress
from hpc_train.training.meters import Meters, StatusWriter
from hpc_train.training.model_selection import ModelSelection
from hpc_train.training.non_finite import Guard, RollbackError, check_evaluation, seen_error
from hpc_train.training.profiling import StepProfiler
from hpc_train.training.rank import Rank
from hpc_train.training.step import StepObserver, train_step
from hpc_train.training.step_times import FirstStep, StepProgress
from hpc_train.training.tasks.base import optional_metrics
from hpc_train.training.train_state import TrainState
from hpc_train.training.verification import WrongResultError


@dataclass
class Saves:
    """Every rank has one. ``extra``: step → the content of a checkpoint besides tensors.

    ``on_saved`` receives each committed save. Before a checkpoint is committed, the rows of metrics up to its
    step are synced to the disk.
    """

    checkpointer: Checkpointer
    state: TrainingState
    meters: Meters
    extra: Callable[[int], dict[str, Any]]
    on_saved: Callable[[Save], None]
    _rows_are_written: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._rows_are_written.set()

    @property
    def has_failed(self) -> bool:
        """True if this rank's part of the save in progress has failed; ``finish`` raises on all ranks."""
        return self.checkpointer.has_failed

    @property
    def is_busy(self) -> bool:
        """True if a save is in progress and has not failed."""
        return self.checkpointer.is_busy

    def reserve(self) -> None:
        """Allocate the staging memory; called once the optimizer's state exists."""
        self.checkpointer.reserve(self.state)

    def begin(self, step: int) -> None:
        """Begin to save ``step``; an earlier save is finished first. Collective, at a step's boundary."""
        self.finish()
        self._rows_are_written.clear()
        self.meters.exchange_digests()
        self.checkpointer.begin(self.state, step, self.extra(step), before_commit=self._sync_rows)

    def wait_staged(self) -> None:
        """Wait until the weights may change again."""
        with self.meters.times.paused():
            self.checkpointer.wait_staged()
        if not self._rows_are_written.is_set():
            self.meters.drain(wait=True)
            self._rows_are_written.set()

    def collect(self) -> None:
        """Report a save that has been committed meanwhile; never waits."""
        self._note_saved(self.checkpointer.collect())

    def finish(self) -> None:
        """Wait for the save in progress. Raises its error, of the same class on every rank."""
        self.wait_staged()
        self._note_saved(self.checkpointer.finish())

    def close(self) -> None:
        """Finish, and wait until old checkpoints are removed. At the end of the run, or before a rollback."""
        self.finish()
        self.checkpointer.close()
        self.checkpointer.clear_up()

    def _note_saved(self, save: Save | None) -> None:
        if save is not None:
            self.on_saved(save)

    def _sync_rows(self) -> None:
        """Sync the rows of metrics. Runs in the writer's thread."""
        self._rows_are_written.wait()
        self.meters.sync()


class NoSaves(Saves):
    """Saves nothing: for a replay, which may not change the run."""

    has_failed = False
    is_busy = False

    def __init__(self) -> None:
        """Create no staging memory."""

    def begin(self, step: int = 0) -> None:
        """Do nothing; so do the other methods."""

    reserve = wait_staged = collect = finish = close = begin


#: How long a rank waits for its data before ranks check again whether to stop (assumed).
_DATA_PAUSE_S = 0.05


@dataclass(frozen=True)
class Cadence:
    """The steps that are evaluated and saved: functions of the step, so that a resumed run does the same.

    ``by_job``: jobs evaluate.
    """

    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    total_steps: int
    steps_per_epoch: int
    by_job: bool = False

    @cached_property
    def save_every_s(self) -> float | None:
        """Seconds between saves; None if they are due by steps."""
        minutes = minutes_between_saves(self.checkpoint)
        return None if minutes is None else minutes * 60

    @cached_property
    def _evaluate_every(self) -> int:
        return evaluation_interval(self.evaluation, self.steps_per_epoch)

    def evaluates(self, step: int) -> bool:
        """Return True if the ranks evaluate after ``step``."""
        return not self.by_job and self._evaluation_is_due(step)

    def evaluates_by_job(self, step: int) -> bool:
        """Return True if a job of its own evaluates the checkpoint of ``step``."""
        return self.by_job and self._evaluation_is_due(step)

    def _evaluation_is_due(self, step: int) -> bool:
        return step > 0 and (step % self._evaluate_every == 0 or step == self.total_steps)

    def saves(self, step: int) -> bool:
        """Return True if ``step`` is saved regardless of time; the last step always is."""
        is_due = step == self.total_steps or any(step % every == 0 for every in self._save_every)
        return is_due or self.evaluates_by_job(step)

    @cached_property
    def _save_every(self) -> tuple[int, ...]:
        return tuple(filter(None, (self.checkpoint.every_steps, self.checkpoint.keep_every)))


@dataclass
class AutoInterval:
    """Rank 0's interval of ``checkpoint.every: auto``. Its flag of a due save counts for all ranks."""

    events: EventLog
    #: The records of the run's earlier attempts.
    earlier: Sequence[AttemptRecord]
    every_s: float = field(init=False)
    _saves: int = 0
    _stall_s: float = 0.0
    _began_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._decide()

    @classmethod
    def of(cls, rank: Rank) -> AutoInterval | None:
        """Return the interval for this attempt; None without the key, and on ranks other than rank 0."""
        if not rank.experiment.checkpoint.every or not rank.events:
            return None
        return cls(rank.events, [record for record in records(rank.paths) if record.attempt < rank.attempt])

    def saved(self, stall_s: float) -> None:
        """Take a committed save into account."""
        self._saves, self._stall_s = self._saves + 1, self._stall_s + stall_s
        self._decide()

    def _decide(self) -> None:
        trained_s = time.monotonic() - self._began_at
        interval = save_interval(self.earlier, trained_s=trained_s, saves=self._saves, stall_s=self._stall_s)
        self.every_s = interval.every_s
        self.events.save_interval = interval.to_json()


@dataclass
class BadSampleCount:
    """``here``: this rank's count in this attempt. ``check`` raises if the sum is too high."""

    here: Callable[[], int]
    check: Callable[[int], None]


@dataclass
class Trainer:
    """One rank's view of the run. All methods are collective."""

    state: TrainState
    forward: TrainingForward
    training: TrainingBatches
    step: int
    cadence: Cadence
    guard: Guard
    max_norm: float | None
    #: None without validation data.
    evaluator: Evaluator | None
    #: Saves the best checkpoint and stops early, by the evaluations.
    selection: ModelSelection
    saves: Saves
    meters: Meters
    agreement: Agreement
    progress: Progress
    step_progress: StepProgress
    first_step: FirstStep
    bad_samples: BadSampleCount
    #: Called with ``agreed`` once all ranks have agreed to stop, and ``saved`` once the state is on disk.
    on_event: Callable[[str], None]
    #: On rank 0 only, like ``profiler`` and ``interval``.
    status: StatusWriter | None = None
    #: Replaces the time of ``cadence``.
    interval: AutoInterval | None = None
    profiler: StepProfiler | None = None
    #: Requests the evaluation of a step's checkpoint by a job; on rank 0 only.
    request_evaluation: Callable[[int], None] | None = None
    observers: Sequence[StepObserver] = ()
    _save_began_at: float = field(default_factory=time.monotonic)

    def train(self) -> bool:
        """Train to the last step, or until ``early_stopping``. Returns False, after a save, on a stop
        request.

        Raises RollbackError on every rank if the run must roll back.
        """
        saved_step = self.step
        if self._evaluation_is_missing():
            if not self._evaluate():
                return False
            if self.selection.saves(self.step):  # again: the checkpoint is now the best
                self._begin_save()
        self.state.wrapped.train()
        steps = () if self.selection.has_stopped else self.meters.times.reading(self.training)
        for step, batches in steps:
            agreed = self._one_step(step, batches)
            if (
                agreed.stop
                or (self.cadence.evaluates(self.step) and not self._evaluate())
                or (agreed.is_waiting and not self._wait_for_data())
            ):
                return self._stop(saved_step)
            if agreed.save or self.cadence.saves(self.step) or self.selection.saves(self.step):
                self._begin_save()
                saved_step = self.step
            self.saves.collect()
            if self.selection.has_stopped:
                break
        assert self.selection.has_stopped or self.step == self.cadence.total_steps
        assert saved_step == self.step, "the last step is saved"
        self._saving(self.saves.close)
        return True

    def _one_step(self, step: int, batches: list[Batch]) -> Consensus:
        """Train one step while the ranks exchange their flags."""
        is_first = not self.first_step.is_over
        if is_first:
            self.first_step.begin(batches[0])
        self.step_progress.begin_step(step)
        self.agreement.begin(self._own_flags())
        if is_first:
            with self.first_step.running():
                is_allowed = self._train_step(step, batches)
        else:
            is_allowed = self._train_step(step, batches)
        agreed = self.agreement.wait()
        if agreed.needs_check or not is_allowed:
            with self._saves_finished():
                self._raise_if_failed(step, is_allowed, agreed)
        if self.profiler is not None:
            with self.meters.times.paused():
                self.profiler.step_done()
        return agreed

    def _train_step(self, step: int, batches: list[Batch]) -> bool:
        """Return True if the weights were allowed to change."""
        has_row, sums = self.meters.train_row_is_due(step + 1), self.forward.training_sums
        sums.begin(is_due=has_row)
        # Wait for a save that is still copying the weights before they change.
        hooks = self.saves.wait_staged, self.observers
        try:
            done = train_step(self.state, step, batches, self.forward, self.guard, self.max_norm, *hooks)
        except WrongResultError as wrong:
            self.saves.close()
            wrong.set_aside()
            raise wrong.error from wrong
        if not done.is_allowed and self.guard.reaction == "skip":
            with self._saves_finished():
                self.guard.after_skip(step + 1)
        self.step = step + 1
        if has_row:
            metrics = sums.result(owns_loss=self.state.strategy.owns_loss)
            self.meters.train_row(self.step, done.learning_rate, done.loss, done.grad_norm, metrics)
        if self.status is not None:
            self.status.step_done(self.step)
        if not self.first_step.is_over:
            self.saves.reserve()
            self.first_step.end()
            self.step_progress.phase = "training"
        return done.is_allowed

    def _own_flags(self) -> StepFlags:
        every_s = self.cadence.save_every_s if self.interval is None else self.interval.every_s
        return StepFlags(
            save=every_s is not None
            and not self.saves.is_busy
            and time.monotonic() - self._save_began_at >= every_s,
            has_failed=self.saves.has_failed,
            is_waiting=not self.training.is_ready(),
            is_non_finite=self.guard.has_seen,
            bad_samples=self.bad_samples.here(),
        )

    @contextmanager
    def _saves_finished(self) -> Iterator[None]:
        """Commit the save in progress before propagating an error that either all ranks raise or none."""
        try:
            yield
        except RollbackError:
            self.saves.close()  # so that no checkpoint is removed while the rollback chooses one
            raise
        except HpcTrainError:
            self.saves.finish()
            raise

    def _raise_if_failed(self, step: int, is_allowed: bool, agreed: Consensus) -> None:
        """Raise the same error on every rank if training can't simply continue."""
        if agreed.is_non_finite:
            self.meters.exchange_digests()
            self.meters.drain(wait=True)
            raise seen_error(self.step)
        if agreed.has_failed:
            self.saves.finish()
            raise AssertionError("a save that failed raises")
        self.bad_samples.check(agreed.bad_samples)
        if not is_allowed and self.guard.reaction == "rollback":
            if agreed.stop:
                raise TryAgainError(f"stopped while going back from step {self.step}; nothing of it is saved")
            raise RollbackError(step, self.guard.spike)

    def _evaluate(self) -> bool:
        """Write the ``val`` row of this step. Returns False if a stop request cut the evaluation short."""
        if self.evaluator is None:
            return True
        with self.meters.times.paused():
            metrics = self.evaluator.metrics(self.step)
            if metrics is None:
                return False
            self.meters.val_row(self.step, metrics)
            with self._saves_finished():
                if self.guard.policy == "stop":
                    check_evaluation(self.step, metrics)
                try:
                    self.selection.evaluated(self.step, metrics, optional_metrics(self.forward.task))
                except BadFileError:  # not a metric of the task: save, so that the corrected run resumes
                    self._begin_save()
                    raise
        return True

    def _evaluation_is_missing(self) -> bool:
        """Return True if the current step should have been evaluated but the evaluation was cut short."""
        if self.evaluator is None or not self.cadence.evaluates(self.step):
            return False
        return not self.agreement.rank_0_says(self.meters.has_val_row(self.step))

    def _wait_for_data(self) -> bool:
        """Wait at this boundary until every rank has its next step's data. Returns False on a stop request.

        Waiting within the step would block the other ranks in a collective, where they can't handle signals.
        """
        with self.meters.times.waiting_for_data():
            while True:
                is_waiting = not self.training.is_ready(_DATA_PAUSE_S)
                agreed = self.agreement.exchange(StepFlags(is_waiting=is_waiting))
                if agreed.stop or not agreed.is_waiting:
                    return not agreed.stop
                if is_waiting:  # the others wait for this rank, so the watchdog should name it
                    self.progress.at("waiting for data")

    def _begin_save(self) -> None:
        self._save_began_at = time.monotonic()
        with self.meters.times.paused():
            share_all_buffers(self.state)
            if self.request_evaluation is not None and self.cadence.evaluates_by_job(self.step):
                self.request_evaluation(self.step)
            self._saving(lambda: self.saves.begin(self.step))
        if self.status is not None:
            self.status.write("running", self.step)

    def _stop(self, saved_step: int) -> bool:
        """Save, unless this step's save is already in progress, and wait until it is committed."""
        self.on_event("agreed")
        if saved_step != self.step:
            self._begin_save()
        self._saving(self.saves.finish)
        self.on_event("saved")
        return False

    def _saving(self, work: Callable[[], None]) -> None:
        self.progress.at("saving", self.step)
        work()
