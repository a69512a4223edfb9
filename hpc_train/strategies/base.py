"""The protocol of a strategy, and what data-parallel strategies share.

Legend: R data-parallel ranks, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpc_train.config.training_sections import ParallelConfig
from hpc_train.datasets.types import Batch
from hpc_train.distributed.precision import Precision
from hpc_train.distributed.shared_sum import SharedSum
from hpc_train.topology.degrees import Degrees
from hpc_train.topology.strategy_traits import problems_of_arguments


class Forward(Protocol):
    """The computation of one micro-batch in training. Methods are collective only if the model's forward is,
    except ``with_loss_factors``.
    """

    def with_loss_factors(self, batches: Sequence[Batch], *, owns_loss: bool) -> Sequence[Batch]:
        """Return this rank's micro-batches with their ``loss_factor``. Collective over all ranks.

        ``train_step`` calls it once per step; strategies receive its result.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the whole forward as ``begin`` has it; return the mean loss times ``loss_factor``, shape ()."""

    def begin(self, batch: Batch, stage: int = 0) -> AbstractContextManager[object]:
        """Seed the random streams for the batch, of each stage its own; return what a forward runs in."""

    def to_input(self, batch: Batch) -> Batch:
        """Return the batch on the device, its inputs as the model takes them."""

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the model's outputs for the batch as ``loss`` does. Moves only the targets."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return what backward begins at: ``loss``, multiplied by the scaler's factor under fp16."""


@dataclass(frozen=True)
class RankContext:
    """What a strategy receives: the rank's place, its device and its precision."""

    rank: int
    degrees: Degrees
    device: torch.device
    precision: Precision
    channels_last: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    #: ``Group.open_shared_sum``.
    open_shared_sum: Callable[[], SharedSum | None] = lambda: None

    @property
    def args(self) -> dict[str, Any]:
        """The strategy's own options, ``parallel.args`` of the file."""
        return self.parallel.args

    def check_args(self, strategy: str) -> None:
        """Raise BadFileError unless ``args`` are those of this strategy of the package."""
        for problem in problems_of_arguments(strategy, self.args):
            raise problem.as_error()

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.degrees.world_size


@dataclass(frozen=True)
class Piece:
    """A part of one tensor: ``local`` is the part at ``offset`` in a tensor of ``shape``.

    ``is_writer`` is true on exactly one of the ranks that hold the same part: that one saves it.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor
    is_writer: bool


class Strategy(Protocol):
    """How ranks share one model. Constructed as ``Strategy(context)``. Collective unless said."""

    #: Whether the strategy casts to the compute dtype by itself; otherwise the loop uses autocast.
    handles_mixed_precision: bool
    #: Of the ranks that share one copy of the model exactly one reports: its losses and its sums of an
    #: evaluation count.
    owns_loss: bool
    #: After ``place``: what this rank holds of the model, under the names that it has there.
    model: nn.Module

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Put the model (on the CPU, compiled in place where the file says so) on the ranks' devices.

        Every rank passes the same weights. Returns the module whose ``forward`` training and evaluation call;
        where ranks share layers it gives all of them something of the outputs' shape and dtype, but the
        outputs themselves to those that report.
        """

    def optimized(self) -> dict[str, nn.Parameter]:
        """Return name → what the optimizer is to hold: the parameters that are trained and that this rank
        has a part of, or what represents them here, under their names and in their order. Not collective;
        after ``place``.
        """

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        """Run forward and backward of this rank's micro-batches; gradients are afterwards those of
        the mean of ``forward.loss`` over all M, and BatchNorm's running statistics those that all M update
        in order (``strategies.running_statistics``). Returns this rank's weighted sum of
        losses, detached, shape (); zero where it does not report.
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

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Tell which parts of which global tensor this rank owns: of the parameter or buffer ``like``, or
        of what the optimizer or an average keeps for it. Always as many for tensors of one shape.

        Not collective. ``local`` shares memory with ``tensor``: copying into it changes the tensor.
        """

    def empty_like(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Return an uninitialised tensor of global ``shape``, placed like the parameter ``like``, or whole.

        Not collective. For optimizer state that a checkpoint brings back before the optimizer made any.
        """
