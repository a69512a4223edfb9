"""Parts of a training step for tests: a ``Forward`` that needs no task, and the optimizer's part alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.experiment.config.training_sections import CompileConfig, OptimizerConfig
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.forward import TrainingForward
from hpc_train.training.optimization import Optimization, make_optimizer
from hpc_train.training.tasks.base import Task
from hpc_train.training.train_state import TrainState

_CPU = torch.device("cpu")


def training_forward(task: Task, **keys: Any) -> TrainingForward:
    """Return the forward of training on the CPU, plain but for ``keys``, which are its fields."""
    plain = {
        "seed": 0,
        "device": _CPU,
        "compile": CompileConfig(),
        "context": nullcontext,
        "to_device": lambda batch: batch,
        "scale": lambda loss: loss,
    }
    return TrainingForward(task=task, **plain | keys)


def make_train_state(
    strategy: Any,
    model: nn.Module,
    blocks: list[nn.Module],
    optimizer: OptimizerConfig,
    samples: int,
    precision: str = "fp64",
) -> TrainState:
    """Place the model and return all that a step changes; the learning rate is constant."""
    wrapped = strategy.place(model, blocks)
    made = make_optimizer(optimizer, strategy.optimized(), samples)
    optimization = Optimization(made, lambda step: 1.0, choose_precision(precision, _CPU), _CPU)
    return TrainState(strategy.model, wrapped, strategy, optimization)


def dealt(make: Callable[[int, float], Batch], micro_batches: int, rank: int, ranks: int) -> list[Batch]:
    """Return a data-parallel rank's micro-batches of a step; a spare slot repeats one with weight zero.

    ``make`` is called with a micro-batch's number and weight.
    """
    own = [make(number, 1 / micro_batches) for number in range(rank, micro_batches, ranks)]
    return own + [make(rank, 0.0)] * (-(-micro_batches // ranks) - len(own))


@dataclass(frozen=True)
class PlainForward:
    """``loss`` runs the model's forward itself."""

    loss: Callable[[nn.Module, Batch], Tensor]
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

    def with_loss_factors(self, batches: Sequence[Batch], *, owns_loss: bool) -> Sequence[Batch]:
        return batches

    def begin(self, batch: Batch, stage: int = 0) -> AbstractContextManager[object]:
        return nullcontext()

    def to_input(self, batch: Batch) -> Batch:
        return batch

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        return self.loss(_Given(outputs), batch)


class _Given(nn.Module):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *inputs: Any) -> Any:
        return self._outputs


def optimizer_step(optimization: Optimization, clip: Callable[[], Tensor] | None = None) -> Tensor | None:
    """Do what ``train_step`` does after backward; return what ``clip`` did."""
    optimization.unscale_gradients()
    norm = None if clip is None else clip()
    optimization.step()
    optimization.zero_grad()
    return norm
