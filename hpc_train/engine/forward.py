"""What training computes of one micro-batch: ``strategies.base.Forward``, made of the file's parts.

The trainer makes one and hands it to the strategy, which calls it whole or, where ranks share layers, piece
by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.training_sections import CompileConfig
from hpc_train.engine.compiling import begin_forward
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.seeds import seed_forward
from hpc_train.tasks.base import Task


@dataclass(frozen=True)
class TrainingForward:
    """See ``strategies.base.Forward``."""

    seed: int
    task: Task
    device: torch.device
    compile: CompileConfig
    #: What a forward runs in: autocast, where the strategy does not cast by itself.
    context: Callable[[], AbstractContextManager[object]]
    #: From a loader's batch to what the model takes.
    to_input: Callable[[Batch], Batch]
    #: ``Optimization.scale``.
    scale: Callable[[Tensor], Tensor]
    #: Told of each batch that runs whole: stages of a pipeline begin theirs in orders of their own, by which
    #: the watchdog can't compare them.
    on_begin: Callable[[Batch], None] = lambda batch: None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.on_begin(batch)
        # Moved one by one: a step may have more micro-batches than the device has room for.
        with self.begin(batch):
            return self.task.loss(model, self.to_input(batch))

    @contextmanager
    def begin(self, batch: Batch, stage: int = 0) -> Iterator[None]:
        seed_forward(self.seed, batch.step, batch.number, self.device, stage)
        begin_forward(self.compile, self.device)
        with self.context():
            yield

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        with self.context():
            return self.task.loss(_Given(outputs), self.to_input(batch))


class _Given(nn.Module):
    """A model that has run already."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *inputs: Any) -> Any:
        return self._outputs
