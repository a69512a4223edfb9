"""The protocol of a strategy, and its inputs and outputs.

Legend: R data-parallel ranks, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.topology.strategy_traits import problems_of_arguments
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import Precision
from hpc_train.training.distributed.shared_flags import SharedSum


class Forward(Protocol):
    """The computation of one micro-batch. Except ``with_loss_factors``, collective only if the model is."""

    def with_loss_factors(self, batches: Sequence[Batch], *, owns_loss: bool) -> Sequence[Batch]:
        """Return this rank's micro-batches with their ``loss_factor``. Collective over all ranks.

        Called once per step by ``train_step``; strategies receive its result.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the whole forward in ``begin``; return the mean loss times ``loss_factor``, shape ()."""

    def begin(self, batch: Batch, stage: int = 0) -> AbstractContextManager[object]:
        """Seed the random streams of the batch and the stage; return the context of the forward."""

    def to_input(self, batch: Batch) -> Batch:
        """Return the batch on the device, its inputs in the form that the model takes."""

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the model's outputs for the batch, like ``loss``. Moves only the targets."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the tensor for backward: ``loss``, multiplied by the scaler's factor under fp16."""


@dataclass(frozen=True)
class RankContext:
    """The inputs of a strategy: the rank, its device, its precision, and the options of the file."""

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
        """The strategy's options, ``parallel.args`` of the file."""
        return self.parallel.args

    def check_args(self, strategy: str) -> None:
        """Raise BadFileError unless ``args`` are valid for this strategy of the package."""
        for problem in problems_of_arguments(strategy, self.args):
            raise problem.as_error()

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.degrees.world_size


@dataclass(frozen=True)
class Piece:
    """A part of one tensor: ``local`` is the part at ``offset`` in a tensor of ``shape``.

    ``is_writer`` is true on exactly one of the ranks that hold the same part; this rank saves it.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor
    is_writer: bool


class Strategy(Protocol):
    """How ranks share one model. Constructed as ``Strategy(context)``. Collective unless stated otherwise."""

    #: Whether the strategy casts to the compute dtype; otherwise the loop uses autocast.
    handles_mixed_precision: bool
    #: Exactly one of the ranks that share a copy of the model reports: its losses and evaluation sums count.
    owns_loss: bool
    #: After ``place``: this rank's part of the model, under the model's names.
    model: nn.Module

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Place the model (on the CPU, compiled in place if the file requests it) on the ranks' devices.

        Every rank passes the same weights. Returns the module whose ``forward`` training and evaluation call.
        If ranks share layers, every rank gets a tensor of the outputs' shape and dtype, but only ranks with
        ``owns_loss`` get the values.
        """

    def optimized(self) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters by name: the trained parameters of which this rank has a part, or
        tensors that represent them, in the model's order. Not collective; after ``place``.
        """

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        """Run forward and backward of this rank's micro-batches.

        Afterwards the gradients are those of the mean of ``forward.loss`` over all M, and BatchNorm's running
        statistics as if all M had updated them in order (``strategies.batchnorm``). Returns this
        rank's weighted sum of losses, detached, shape (); zero without ``owns_loss``.
        """

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global L2 norm is at most ``max_norm``.

        Returns the norm before clipping, shape (), float32. Non-finite norms are returned, not raised.
        """

    def weights_changed(self) -> None:
        """Update the model on every rank after ``optimizer.step`` has changed ``optimized``."""

    def share_buffers(self, *, all_persistent: bool) -> None:
        """Copy rank 0's buffers to every rank.

        All persistent buffers before an evaluation or a save; before a step only those that a training
        forward may read.
        """

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Return the parts of a global tensor that this rank owns.

        ``tensor``: the parameter or buffer ``like``, or optimizer state or an average of it. The number of
        parts depends only on the shape. Not collective. ``local`` shares memory with ``tensor``: copying into
        it changes the tensor.
        """

    def empty_like(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Return an uninitialized tensor of global ``shape``, placed like the parameter ``like``, or whole.

        Not collective. For optimizer state that is loaded before the optimizer creates any.
        """
