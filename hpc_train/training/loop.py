"""The training loop. ``training.build`` passes in everything it uses; the loop only determines the order.

``step`` counts completed optimizer steps: the first step trained is step 0, after it ``step`` is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.types import Batch
from hpc_train.distributed.consensus import Agreement, Consensus, StepFlags
from hpc_train.distributed.precision import Precision
from hpc_train.errors import BadFileError, HpcTrainError, TryAgainError
from hpc_train.health.progress import Progress
from hpc_train.tasks.base import Task, optional_metrics
from hpc_train.training.cadence import Cadence
from hpc_train.training.compiling import first_step
from hpc_train.training.evaluation import Evaluator, Validation, metrics_of, share_all_buffers
from hpc_train.training.evaluation_files import EvaluationFiles, files_of
from hpc_train.training.forward import TrainingForward
from hpc_train.training.meters import Meters, StatusWriter
from hpc_train.training.model_selection import ModelSelection
from hpc_train.training.non_finite import Guard, RollbackError, check_evaluation, seen_error
from hpc_train.training.pictures import Pictures
from hpc_train.training.run_ahead import RunAhead
from hpc_train.training.saving import Saves
from hpc_train.training.step import train_step
from hpc_train.training.text_samples import TextSamples
from hpc_train.training.train_state import TrainState

#: How long a rank waits for its data before ranks check again whether to stop (assumed).
_DATA_PAUSE_S = 0.05


class Profiler(Protocol):
    """See ``training.profiling.StepProfiler``."""

    def step_done(self) -> None:
        """Called after each step."""


class Steps(Iterator[tuple[int, list[Batch]]], Protocol):
    """(step, this rank's micro-batches of it) for every remaining step."""

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return True if the next step's data are ready, or arrive within this number of seconds."""


@dataclass
class BadSampleCount:
    """``here``: this rank's count in this attempt. ``check`` raises if the sum is too high."""

    here: Callable[[], int]
    check: Callable[[int], None]


@dataclass
class Trainer:
    """One rank's view of the run. All methods are collective."""

    experiment: Experiment
    device: torch.device
    precision: Precision
    task: Task
    state: TrainState
    guard: Guard
    agreement: Agreement
    progress: Progress
    meters: Meters
    #: On rank 0 only, like ``profiler``.
    status: StatusWriter | None
    cadence: Cadence
    training: Steps
    validation: Validation | None
    bad_samples: BadSampleCount
    #: Converts a loader's batch to the model's input.
    to_input: Callable[[Batch], Batch]
    saves: Saves
    on_first_step: Callable[[], None]
    #: Called with ``agreed`` once all ranks have agreed to stop, and ``saved`` once the state is on disk.
    on_event: Callable[[str], None]
    step: int
    #: Saves the best checkpoint and stops early, by the evaluations; None: neither.
    selection: ModelSelection | None = None
    profiler: Profiler | None = None
    #: None on the CPU, since the host computes.
    run_ahead: RunAhead | None = None
    #: On rank 0 only.
    evaluation_files: EvaluationFiles | None = None
    text_samples: TextSamples | None = None
    pictures: Pictures | None = None
    #: Called with this rank's first micro-batch, before its forward.
    on_first_batch: Callable[[Batch], None] = lambda batch: None
    _has_stepped: bool = False
    #: Counts the step's forward passes, the same number on every rank, including a rehearsal.
    _slot: int = 0
    _save_began_at: float = field(default_factory=time.monotonic)
    _forward: TrainingForward = field(init=False)
    _evaluator: Evaluator = field(init=False)

    def __post_init__(self) -> None:
        self._forward = TrainingForward.of(
            self.experiment,
            self.state,
            self.task,
            self.precision,
            self.device,
            self.to_input,
            on_begin=self._begin_slot,
            on_end=self._end_slot,
        )
        self._evaluator = Evaluator(
            self.state, self.task, self._forward, self.device, self.agreement, self.progress, self.pictures
        )

    def train(self) -> bool:
        """Train to the last step, or until ``early_stopping``. Returns False, after a save, on a stop
        request.

        Raises RollbackError on every rank if the run must roll back.
        """
        saved_step = self.step
        if self._evaluation_is_missing():
            if not self._evaluate():
                return False
            if self._must_save():  # again: the checkpoint is now the best
                self._begin_save()
        if self._has_stopped_early():
            self._saving(self.saves.close)
            return True
        self.state.wrapped.train()
        for step, batches in self.meters.times.reading(self.training):
            agreed = self._one_step(step, batches)
            must_stop = agreed.stop
            if not must_stop and self.cadence.evaluates(self.step):
                must_stop = not self._evaluate()
            if not must_stop and agreed.is_waiting:
                with self.meters.times.waiting_for_data():
                    must_stop = not self._wait_for_data()
            if must_stop:
                return self._stop(saved_step)
            if agreed.save or self.cadence.saves(self.step) or self._must_save():
                self._begin_save()
                saved_step = self.step
            self.saves.collect()
            if self._has_stopped_early():
                break
        assert self._has_stopped_early() or self.step == self.cadence.total_steps
        assert saved_step == self.step, "the last step is saved"
        self._saving(self.saves.close)
        return True

    def _one_step(self, step: int, batches: list[Batch]) -> Consensus:
        """Train one step while the ranks exchange their flags."""
        if not self._has_stepped:
            self.on_first_batch(batches[0])
        self._slot = 0
        if self.run_ahead is not None:
            self.run_ahead.begin(step)
        self.progress.at(self._training, step)
        self.agreement.begin(self._own_flags())
        with nullcontext() if self._has_stepped else first_step(self.experiment.compile):
            is_allowed = self._train_step(step, batches)
        agreed = self.agreement.wait()
        if agreed.needs_check or not is_allowed:
            with self._saves_finished():
                self._raise_if_failed(step, is_allowed, agreed)
        if self.profiler is not None:
            self.profiler.step_done()
        return agreed

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
            raise seen_error(self.step)
        if agreed.has_failed:
            self.saves.finish()
            raise AssertionError("a save that failed raises")
        self.bad_samples.check(agreed.bad_samples)
        if not is_allowed and self.guard.policy == "rollback":
            if agreed.stop:
                raise TryAgainError(f"stopped while going back from step {self.step}; nothing of it is saved")
            raise RollbackError(step)

    @property
    def _training(self) -> str:
        return "training" if self._has_stepped else "first step"

    def _own_flags(self) -> StepFlags:
        return StepFlags(
            save=self._save_is_due_by_time(),
            has_failed=self.saves.has_failed,
            is_waiting=not self.training.is_ready(),
            is_non_finite=self.guard.has_seen,
            bad_samples=self.bad_samples.here(),
        )

    def _train_step(self, step: int, batches: list[Batch]) -> bool:
        """Return True if the weights were allowed to change."""
        max_norm = self.experiment.optimization.clip_grad_norm
        # Wait for a save that is still copying the weights before they change.
        self._forward.training_sums.begin(is_due=self.meters.train_row_is_due(step + 1))
        done = train_step(
            self.state, step, batches, self._forward, self.guard, max_norm, self.saves.wait_staged
        )
        if not done.is_allowed and self.guard.policy == "skip":
            with self._saves_finished():
                self.guard.after_skip(step + 1)
        self.step = step + 1
        if self.meters.train_row_is_due(self.step):
            sums = self._forward.training_sums.result(owns_loss=self.state.strategy.owns_loss)
            self.meters.train_row(self.step, done.learning_rate, done.loss, done.grad_norm, sums)
        if self.status is not None:
            self.status.step_done(self.step)
        if not self._has_stepped:
            self._has_stepped = True
            self.saves.reserve()
            self.on_first_step()
        return done.is_allowed

    def _begin_slot(self, batch: Batch) -> None:
        self._slot += 1
        if self.run_ahead is not None and self._slot > 1:
            self.run_ahead.begin(batch.step, self._slot)
        self.progress.at(self._training, batch.step, part=self._slot)
        if self._slot == 1:
            self.meters.forward_time.begin()

    def _end_slot(self) -> None:
        if self._slot == 1:
            self.meters.forward_time.end()

    def _evaluate(self) -> bool:
        """Write the ``val`` row of this step. Returns False if a stop request cut the evaluation short."""
        if self.validation is None:
            return True
        with self.meters.times.paused():
            return self._evaluated(self.validation)

    def _evaluated(self, validation: Validation) -> bool:
        sums = self._evaluator.sums(validation, self.step)
        if sums is None:
            return False
        files = self._text_sample() | (self.pictures.files() if self.pictures is not None else {})
        if self.evaluation_files is not None:  # before the row: once it exists, the files are complete
            self.evaluation_files.write(self.step, files)
            for prefix, each in sums.items():
                self.evaluation_files.write(self.step, files_of(self.task, each, prefix))
        metrics = metrics_of(self.task, sums)
        self.meters.val_row(self.step, metrics)
        if self.guard.policy == "stop":
            with self._saves_finished():
                check_evaluation(self.step, metrics)
        if self.selection is not None:
            with self._saves_finished():
                self._select(self.selection, metrics)
        return True

    def _select(self, selection: ModelSelection, metrics: Mapping[str, float]) -> None:
        try:
            selection.evaluated(self.step, metrics, optional_metrics(self.task))
        except BadFileError:  # not a metric of the user's task: save, so that the corrected run resumes here
            self._begin_save()
            raise

    def _text_sample(self) -> dict[str, bytes]:
        """Return the files with the model's sample text. Collective."""
        if self.text_samples is None:
            return {}

        def outputs(batch: Batch) -> Tensor:
            self.progress.at("sampling text", self.step, part=batch.number)
            return self._forward.outputs(self.state.wrapped, batch)

        self.state.wrapped.eval()
        with torch.no_grad():
            files = self.text_samples.files(outputs, self.step)
        self.state.wrapped.train()
        return files

    def _must_save(self) -> bool:
        return self.selection is not None and self.selection.saves(self.step)

    def _has_stopped_early(self) -> bool:
        return self.selection is not None and self.selection.has_stopped

    def _evaluation_is_missing(self) -> bool:
        """Return True if the current step should have been evaluated but the evaluation was cut short."""
        if self.validation is None or not self.cadence.evaluates(self.step):
            return False
        return not self.agreement.rank_0_says(self.meters.has_val_row(self.step))

    def _wait_for_data(self) -> bool:
        """Wait at this boundary until every rank has its next step's data. Returns False on a stop request.

        Waiting within the step would block the other ranks in a collective, where they can't handle signals.
        """
        while True:
            is_waiting = not self.training.is_ready(_DATA_PAUSE_S)
            agreed = self.agreement.exchange(StepFlags(is_waiting=is_waiting))
            if agreed.stop or not agreed.is_waiting:
                return not agreed.stop
            if is_waiting:  # the others wait for this rank, so the watchdog should name it
                self.progress.at("waiting for data")

    def _save_is_due_by_time(self) -> bool:
        every_s = self.cadence.save_every_s
        if every_s is None or self.saves.is_busy:
            return False
        return time.monotonic() - self._save_began_at >= every_s

    def _begin_save(self) -> None:
        self._save_began_at = time.monotonic()
        with self.meters.times.paused():
            share_all_buffers(self.state)
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
