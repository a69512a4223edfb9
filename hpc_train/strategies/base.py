"""The protocol of a strategy, and what data-parallel strategies share.

Legend: R data-parallel ranks, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpc_train.config.degrees import Degrees
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.precision import Precision

#: Forward of one micro-batch: model, batch → mean loss, shape (). Seeds the random streams itself.
LossOf = Callable[[nn.Module, Batch], Tensor]
#: Backward of a weighted loss; scales it first under fp16.
Backward = Callable[[Tensor], None]


@dataclass(frozen=True)
class Placement:
    """What a strategy is told: the rank's place, its device and the numbers' format."""

    rank: int
    degrees: Degrees
    device: torch.device
    precision: Precision
    channels_last: bool
    args: dict[str, Any]

    @property
    def world_size(self) -> int:
        return self.degrees.world_size


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor: ``local`` holds what lies at ``offset`` in a tensor of ``shape``.

    ``is_writer`` is true on exactly one of the ranks that hold the same part: that one saves it.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor
    is_writer: bool


class Strategy(Protocol):
    """How ranks share one model. Constructed as ``Strategy(placement)``. Collective unless said."""

    #: Whether the strategy casts to the compute dtype by itself; otherwise the loop uses autocast.
    casts: bool

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Put the model (on the CPU, compiled in place where the file says so) on the ranks' devices.

        Every rank passes the same weights. Returns the module whose ``forward`` training calls; the
        parameters of ``model`` are from now on those to optimise, under the names they had.
        """

    def optimized(self) -> dict[str, nn.Parameter]:
        """Return name → what the optimizer is to hold: the model's parameters that are trained, or what
        stands for them here, under their names and in their order. Not collective; after ``place``.
        """

    def accumulate(self, batches: Sequence[Batch], loss_of: LossOf, backward: Backward) -> Tensor:
        """Run forward and backward of this rank's micro-batches; gradients are afterwards those of
        the mean over all M. Returns this rank's weighted sum of losses, detached, shape ().
        """

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global L2 norm is at most ``max_norm``.

        Returns the norm before clipping, shape (), float32. Non-finite norms are returned, not raised.
        """

    def weights_changed(self) -> None:
        """Give the model on every rank what ``optimizer.step`` made of ``optimized``."""

    def share_buffers(self, *, all_persistent: bool) -> None:
        """Give every rank rank 0's buffers: all that are saved (before an evaluation or a save), or only
        those that a training forward may read (before a step).
        """

    def piece(self, tensor: Tensor) -> Piece:
        """Tell which part of which global tensor (parameter, buffer, optimizer state) this rank holds.

        Not collective. ``local`` shares memory with ``tensor``: copying into it changes the tensor.
        """

    def empty_like(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Return an uninitialised tensor of global ``shape``, placed like the parameter ``like``, or whole.

        Not collective. For optimizer state that a checkpoint brings back before the optimizer made any.
        """
