"""An exponential moving average (EMA) of the weights, placed and sharded like the model's.

``train_state.assemble`` makes one after the optimizer; ``step`` updates it, and ``evaluator`` evaluates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.strategies.base import Strategy
from hpc_train.training.strategies.buffers import Buffers
from hpc_train.training.strategies.pieces import local_part


class Ema:
    """Averages of the model's parameters and floating-point buffers; other buffers have their newest value.

    ``averages``: name → tensor, shaped, placed and named like the model's. Each rank averages the tensors it
    owns, so only ``share_buffers`` is collective.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """``model``: already placed, with its initial weights."""
        self._model = model
        self._decay = decay
        self._places = Buffers(model)
        # FSDP keeps these tensor objects for its shards, although the module shows others during a forward.
        self._values = NamedTensors.of(model).tensors
        self.averages = {name: value.detach().clone() for name, value in self._values.items()}
        self._averaged = [name for name, value in self._values.items() if _has_fractions(value)]
        self._copied = [name for name, value in self._values.items() if not _has_fractions(value)]
        self._buffers = [name for name, value in self._values.items() if not isinstance(value, nn.Parameter)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages from the weights; called after each optimizer step."""
        self._places.write_back()
        averages, values = self._locals(self._averaged)
        if averages:
            torch._foreach_lerp_(averages, values, 1 - self._decay)
        for average, value in zip(*self._locals(self._copied), strict=True):
            average.copy_(value)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the model's values with the averages; afterwards both are restored bitwise."""
        self._exchange(self._values)
        try:
            yield
        finally:
            self._exchange(self._values)

    def share_buffers(self, strategy: Strategy) -> None:
        """Broadcast rank 0's averages of buffers, before an evaluation or a save. Collective."""
        # Through the strategy, which knows the ranks that own the same buffers.
        self._exchange(self._buffers)
        try:
            strategy.share_buffers(all_persistent=True)
        finally:
            self._exchange(self._buffers)

    @torch.no_grad()
    def _exchange(self, names: Iterable[str]) -> None:
        # Free parameters that an evaluation's forward left gathered: the next forward would use them.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._places.write_back()
        for average, value in zip(*self._locals(names), strict=True):
            copied = value.clone()
            value.copy_(average)
            average.copy_(copied)

    def _locals(self, names: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of averages and values. Not cached: FSDP may replace a padded one."""
        pairs = [(local_part(self.averages[name]), local_part(self._values[name])) for name in names]
        return [average for average, _ in pairs], [value for _, value in pairs]


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
