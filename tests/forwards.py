"""``strategies.base.Forward`` for tests that need no task: a loss, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpc_train.runtime.data_info import Batch


@dataclass(frozen=True)
class PlainForward:
    """``loss`` runs the model's forward itself."""

    loss: Callable[[nn.Module, Batch], Tensor]
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

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
