"""Metrics of the training samples in a training row, such as their accuracy.

They are computed only in steps that have a row, from the same outputs as the loss, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpc_train.datasets.types import Batch


@runtime_checkable
class HasTrainingSums(Protocol):
    """A task with training metrics besides the loss."""

    #: The names in a ``train`` row; they do not depend on the data.
    training_metrics: tuple[str, ...]

    def training_sums(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum over all samples of the micro-batch for each name, shape (len(names),).

        In a pipeline ``batch.inputs`` is None. Runs without gradients.
        """


@dataclass
class TrainingSums:
    """The sums of a rank's micro-batches in one step."""

    task: HasTrainingSums | None = None
    device: torch.device | None = None
    _is_due: bool = False
    #: By micro-batch number, so that a micro-batch that runs twice (DDP's warm-up) counts once.
    _sums: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, task: object, device: torch.device) -> TrainingSums:
        """Return sums that remain empty if the task has no ``training_sums``."""
        return cls(task if isinstance(task, HasTrainingSums) else None, device)

    def begin(self, *, is_due: bool) -> None:
        """Start a step; nothing is computed if it has no row (``is_due``)."""
        self._is_due = is_due
        self._sums.clear()

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add a micro-batch; a spare slot is ignored."""
        if self._is_due and self.task is not None and batch.weight > 0:
            with torch.no_grad():
                self._sums[batch.number] = self.task.training_sums(outputs, batch)

    def result(self, *, owns_loss: bool) -> dict[str, Tensor]:
        """Return name → sum, shape (); 0 on ranks that don't own a loss. Empty if the step has no row."""
        if not self._is_due or self.task is None:
            return {}
        names = self.task.training_metrics
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for each in self._sums.values() if owns_loss else ():
            total += each
        return dict(zip(names, total, strict=True))
