"""Evaluates weights on all ranks: in training (``loop``), and of a checkpoint (``checkpoint_evaluation``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hpc_train.datasets.base import DataSource
from hpc_train.datasets.batches import evaluation_batch_count, evaluation_batches
from hpc_train.datasets.skipping import BadSamples
from hpc_train.datasets.types import Batch, TargetSpecs
from hpc_train.distributed.consensus import Agreement
from hpc_train.health.progress import Progress
from hpc_train.tasks.base import Task
from hpc_train.training.evaluation import evaluate
from hpc_train.training.forward import TrainingForward
from hpc_train.training.pictures import Pictures
from hpc_train.training.rank import Rank
from hpc_train.training.train_state import TrainState

#: Prefix of the metrics' names → sums of an evaluation.
Sums = dict[str, dict[str, Any]]


@dataclass
class Validation:
    """This rank's validation data, a new iterable per call, and the number of batches of all ranks."""

    batches: Callable[[], Iterable[Batch | None]]
    num_batches: int


def make_validation(
    rank: Rank, source: DataSource, bad_samples: BadSamples | None, spec: TargetSpecs
) -> Validation | None:
    """Return this rank's share of the validation data; None if there are none."""
    split = source.val
    if split is None:
        return None
    size = rank.experiment.optimization.micro_batch_size
    assert isinstance(size, int)
    batches = evaluation_batches(
        split,
        rank.experiment,
        rank.degrees.data_rank(rank.facts.rank),
        rank.degrees.data_ranks,
        rank.device,
        bad_samples,
        spec,
    )
    return Validation(lambda: batches.until(lambda: bool(rank.flag)), evaluation_batch_count(split, size))


def share_all_buffers(state: TrainState) -> None:
    """Broadcast rank 0's buffers, since a save or an evaluation reads them from any rank. Collective."""
    state.strategy.share_buffers(all_persistent=True)
    if state.ema is not None:
        state.ema.share_buffers(state.strategy)


@dataclass(frozen=True)
class Evaluator:
    """The objects that an evaluation needs besides the data."""

    state: TrainState
    task: Task
    forward: TrainingForward
    device: torch.device
    agreement: Agreement
    progress: Progress
    #: Draws predictions, under the prefixes of the metrics' names.
    pictures: Pictures | None = None

    def metrics(self, validation: Validation, step: int) -> dict[str, float] | None:
        """Return the metrics of ``sums``. Collective."""
        sums = self.sums(validation, step)
        return None if sums is None else metrics_of(self.task, sums)

    def sums(self, validation: Validation, step: int) -> Sums | None:
        """Return the sums for the weights after ``step`` and, under ``ema_``, for the EMA weights.

        Collective. Returns None if a rank received a stop request before the end. Leaves the model in
        training mode.
        """
        share_all_buffers(self.state)
        sums = self._sums(validation, step, "")
        if sums is None or self.state.ema is None:
            return None if sums is None else {"": sums}
        with self.state.ema.swapped():
            averages = self._sums(validation, step, "ema_")
        return None if averages is None else {"": sums, "ema_": averages}

    def _sums(self, validation: Validation, step: int, prefix: str) -> dict[str, Any] | None:
        owns_loss = self.state.strategy.owns_loss
        pictures = self.pictures

        def sums_of(batch: Batch) -> dict[str, Any]:
            if pictures is None or not owns_loss:
                return self.forward.sums(self.state.wrapped, batch, step)

            def draw(outputs: Any, moved: Batch) -> None:
                pictures.add(prefix, outputs, moved, batch)

            return self.forward.sums(self.state.wrapped, batch, step, draw)

        def begin(place: int) -> None:
            self.progress.at("evaluating", step, part=place)
            self.agreement.begin()

        if pictures is not None:
            pictures.begin(prefix)
        self.state.wrapped.eval()
        with torch.no_grad():
            sums = evaluate(
                validation.batches(),
                validation.num_batches,
                sums_of,
                self.device,
                begin=begin,
                must_stop=lambda: self.agreement.wait().stop,
                owns_loss=owns_loss,
            )
        self.state.wrapped.train()
        return sums


def metrics_of(task: Task, sums: Sums) -> dict[str, float]:
    """Return the metrics of a ``val`` row, their names with the prefixes."""
    return {
        f"{prefix}{name}": value
        for prefix, each in sums.items()
        for name, value in task.metrics(each).items()
    }
