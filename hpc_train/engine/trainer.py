"""The loop. Everything it uses is handed in by ``worker``; it decides only the order of things.

``step`` counts optimizer steps done: the first step trained is step 0, after it ``step`` is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Experiment
from hpc_train.engine.cadence import Cadence
from hpc_train.engine.evaluation import evaluate
from hpc_train.engine.meters import Meters, NonFiniteError, StatusWriter
from hpc_train.engine.optimization import Optimization
from hpc_train.runtime.agreement import SAVE, STOP, Agreement
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.precision import Precision
from hpc_train.runtime.seeds import seed_forward
from hpc_train.strategies.base import Strategy
from hpc_train.tasks.base import Task


@dataclass
class Validation:
    """The validation data of this rank, afresh at each call, and how many batches all ranks have together."""

    batches: Callable[[], Iterable[Batch]]
    num_batches: int


@dataclass
class Trainer:
    """One rank's view of the run. All methods are collective."""

    experiment: Experiment
    device: torch.device
    precision: Precision
    task: Task
    #: What training calls: the model as the strategy wrapped it.
    model: nn.Module
    strategy: Strategy
    optimization: Optimization
    agreement: Agreement
    meters: Meters
    #: On rank 0 alone.
    status: StatusWriter | None
    cadence: Cadence
    #: (step, this rank's micro-batches of it) for every step that is left.
    training: Iterable[tuple[int, list[Batch]]]
    validation: Validation | None
    #: From a loader's batch to what the model takes.
    to_input: Callable[[Batch], Batch]
    save_checkpoint: Callable[[int], None]
    on_first_step: Callable[[], None]
    #: Called with ``agreed`` once all ranks know that they must stop, and ``saved`` once that is on the disk.
    on_event: Callable[[str], None]
    step: int
    _saved_at: float = field(default_factory=time.monotonic)

    def train(self) -> bool:
        """Train to the last step. Returns False where it was asked to stop; then it has saved."""
        saved_step = self.step
        if self._evaluation_is_missing() and not self._evaluate():
            return False
        self.model.train()
        for step, batches in self.training:
            self.agreement.begin(save=self._save_is_due_by_time())
            self._train_step(step, batches)
            agreed = self.agreement.wait()
            must_stop = bool(agreed & STOP)
            if not must_stop and self.cadence.evaluates(self.step):
                must_stop = not self._evaluate()
            if must_stop:
                self.on_event("agreed")
            if must_stop or agreed & SAVE or self.cadence.saves(self.step):
                self._save()
                saved_step = self.step
            if must_stop:
                self.on_event("saved")
                return False
        assert saved_step == self.step == self.cadence.total_steps, "the last step is saved"
        return True

    def _train_step(self, step: int, batches: list[Batch]) -> None:
        rate = self.optimization.set_learning_rate(step)
        self.strategy.share_buffers(all_persistent=False)
        loss = self.strategy.accumulate(batches, self._loss_of, self.optimization.backward)
        grad_norm = self.optimization.step(self._clip)
        self.step = step + 1
        if self.meters.train_row_is_due(self.step):
            self.meters.train_row(self.step, rate, loss, grad_norm)
        if self.status is not None:
            self.status.step_done(self.step)
        self.on_first_step()
        self.on_first_step = _nothing

    def _clip(self) -> Tensor | None:
        max_norm = self.experiment.optimization.clip_grad_norm
        return None if max_norm is None else self.strategy.clip_gradients(max_norm)

    def _loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        seed_forward(self.experiment.seed, batch.step, batch.number, self.device)
        # Moved one by one: a step may have more micro-batches than the device has room for.
        with self._autocast():
            return self.task.loss(model, self.to_input(batch))

    def _sums_of(self, batch: Batch) -> dict[str, Tensor]:
        seed_forward(self.experiment.seed, self.step, batch.number, self.device)
        with self._autocast():
            return self.task.evaluation_sums(self.model, self.to_input(batch))

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.strategy.casts else self.precision.autocast(self.device)

    def _evaluate(self) -> bool:
        """Write the ``val`` row of this step. Returns False where it was asked to stop before the end."""
        if self.validation is None:
            return True
        self.strategy.share_buffers(all_persistent=True)
        self.model.eval()
        with torch.no_grad():
            sums = evaluate(
                self.validation.batches(),
                self.validation.num_batches,
                self._sums_of,
                self.device,
                must_stop=self.agreement.poll,
            )
        self.model.train()
        if sums is not None:
            self.meters.val_row(self.step, self.task.metrics(sums))
        return sums is not None

    def _evaluation_is_missing(self) -> bool:
        """Tell whether the step that the run stands at should have been evaluated but was cut short."""
        if self.validation is None or not self.cadence.evaluates(self.step):
            return False
        return not self.agreement.rank_0_says(self.meters.has_val_row(self.step))

    def _save_is_due_by_time(self) -> bool:
        every_s = self.cadence.save_every_s
        return every_s is not None and time.monotonic() - self._saved_at >= every_s

    def _save(self) -> None:
        self._refuse_non_finite()
        self.strategy.share_buffers(all_persistent=True)
        self.meters.sync()
        self.save_checkpoint(self.step)
        self._saved_at = time.monotonic()
        if self.status is not None:
            self.status.write("running", self.step)

    def _refuse_non_finite(self) -> None:
        """Raise on every rank where a weight is NaN or infinite: such a checkpoint would be for ever.

        Waits for the device, as the save that follows does.
        """
        parts = [self.strategy.piece(parameter).local for parameter in self.model.parameters()]
        total = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum()
        dist.all_reduce(total)
        if not total.isfinite():
            raise NonFiniteError(
                f"a weight is NaN or infinite after step {self.step}, which is not saved; lower the learning "
                "rate, clip gradients, or use bf16 or fp32"
            )


def _nothing() -> None:
    """Stand in for ``on_first_step`` after the first step."""
