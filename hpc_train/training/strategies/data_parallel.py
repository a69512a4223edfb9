"""The base class of strategies whose ranks run the whole forward on their own micro-batches.

Legend: R ranks, M micro-batches of a step, S = ⌈M/R⌉ slots of a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.types import Batch
from hpc_train.training.strategies.base import Forward, Piece, RankContext
from hpc_train.training.strategies.batchnorm import RunningStatistics
from hpc_train.training.strategies.buffers import Buffers, broadcast_from_rank_0, buffers_kept
from hpc_train.training.strategies.pieces import piece_of


class DataParallel(ABC):
    """Every rank runs the whole forward on its own micro-batches. See ``strategies.base.Strategy``."""

    handles_mixed_precision = False
    owns_loss = True

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.model: nn.Module
        self.wrapped: nn.Module

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Move the model to this rank's device, then ``wrap`` it. Raises BadFileError for complex tensors."""
        refuse_complex(model)
        refuse_renormalized(model, self.context)
        move(model, self.context)
        if self.context.channels_last:
            model.to(memory_format=torch.channels_last)
        self.model = model
        self.wrapped = self.wrap(model, blocks)
        self._buffers = Buffers(model)
        self._statistics = self._running_statistics(model)
        return self.wrapped

    def _running_statistics(
        self, model: nn.Module, group: dist.ProcessGroup | None = None
    ) -> RunningStatistics:
        """Return the statistics of ``model``, or of a stage that the ranks of ``group`` train."""
        rank, degrees = self.context.rank, self.context.degrees
        return RunningStatistics(
            model,
            data_rank=degrees.data_rank(rank),
            data_ranks=degrees.data_ranks,
            group=group,
            is_counted=degrees.tensor_rank(rank) == 0,
        )

    @abstractmethod
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Make the model, already on its device, synchronize its gradients."""

    @abstractmethod
    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one slot; gradients are averaged over ranks in the last slot's backward."""

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        """Run the micro-batches in order; gradients are synchronized in the backward of the last."""
        losses: list[Tensor] = []
        with self._statistics.step(len(batches)):
            for slot, batch in enumerate(batches):
                is_spare = batch.weight == 0
                restored = buffers_kept(self.model) if is_spare else nullcontext()
                statistics = self._statistics.micro_batch(slot, is_spare=is_spare)
                with self.synchronised(slot == len(batches) - 1), restored, statistics:
                    loss = self.forward_backward(batch, forward)
                copied = _float64_copy(loss)
                losses.append(copied if batch.weight == 1 else copied.mul_(batch.weight))
        return sum(losses[1:], losses[0])

    def forward_backward(self, batch: Batch, forward: Forward) -> Tensor:
        """Run forward and backward of a micro-batch; return its loss."""
        loss = forward.loss(self.wrapped, batch)
        # Averaging over ranks divides by R, but the result must be the mean over M micro-batches.
        share = batch.weight * self.context.degrees.data_ranks
        forward.scale(loss if share == 1 else loss * share).backward()
        self._buffers.write_back()
        return loss

    def optimized(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters themselves, or this rank's shards of them."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def weights_changed(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Do nothing: the optimizer changes the model's parameters."""

    def share_buffers(self, *, all_persistent: bool) -> None:
        """Broadcast rank 0's buffers to all ranks."""
        buffers = self._buffers.tensors(all_persistent=all_persistent)
        if buffers and self.context.world_size > 1:
            broadcast_from_rank_0(buffers)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients, which are whole on every rank, without communication."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Return this rank's part of a DTensor, and any other tensor whole, because every rank has it."""
        if isinstance(tensor, DTensor):
            return [piece_of(tensor)]
        shape = tuple(tensor.shape)
        return [Piece(shape, (0,) * len(shape), tensor.detach(), is_writer=self.context.rank == 0)]

    def empty_like(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Return an uninitialized tensor placed like ``like``; whole on the CPU without one of this shape."""
        if like is not None and tuple(shape) == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(tuple(shape), dtype=dtype)


def _float64_copy(loss: Tensor) -> Tensor:
    """Return the loss in memory of its own, since a CUDA graph overwrites its result."""
    loss = loss.detach()
    return loss.clone() if loss.dtype == torch.float64 else loss.double()  # faster than ``to(…, copy=True)``


def move(model: nn.Module, context: RankContext) -> None:
    """Move ``model``, or a stage of it, to the rank's device and parameter dtype, in place.

    ``Module.to`` with a dtype would make complex tensors real (rotary embeddings' ``freqs_cis``).
    """
    real = context.precision.param_dtype

    def dtype_of(tensor: Tensor) -> torch.dtype:
        if tensor.is_complex() and real == torch.float64:
            return torch.complex128
        return real if tensor.is_floating_point() else tensor.dtype

    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.device != context.device or tensor.dtype != dtype_of(tensor) for tensor in tensors):
        model._apply(lambda tensor: tensor.to(context.device, dtype_of(tensor)))


def refuse_complex(model: nn.Module) -> None:
    """Raise BadFileError if a tensor for checkpoints is complex. The result is the same on all ranks."""
    saved = model.state_dict(keep_vars=True).items()
    bad = next((name for name, value in saved if isinstance(value, Tensor) and value.is_complex()), None)
    if bad is not None:
        raise BadFileError(
            f"model.name: {bad} is complex, which no checkpoint can hold; keep torch.view_as_real of it, "
            "or register a constant as a buffer with persistent=False"
        )


def refuse_renormalized(model: nn.Module, context: RankContext) -> None:
    """Raise BadFileError if a forward would change weights (``max_norm``) and ranks run different batches.

    Each rank would rescale the rows of its own micro-batches, so that the ranks' weights differ.
    """
    for name, module in model.named_modules() if context.degrees.data_ranks > 1 else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise BadFileError(
                f"model.name: {name} has max_norm, by which a forward changes the weights, on each rank "
                "those of its own samples; omit it and rescale them in the forward, or start one rank"
            )
