"""BatchNorm's running statistics, equal to those of one process that trains all micro-batches in order.

Each rank runs only some of a step's micro-batches. Without this module its running mean and variance would
be those of its share, and the evaluated and saved model would depend on the number of ranks.

A training forward updates a running value x by an affine rule, x ← (1−f)·x + f·s, with the batch statistic
s and the factor f of ``momentum`` (a cumulative average for ``momentum=None``), and never reads x. So during
a step the buffers serve as scratch memory: they are zero before each micro-batch and hold its contribution
after it. At the end of the step the contributions of all ranks are combined in the order of the
micro-batches, and the buffers hold the running values again.

Cost per step, for any number of ranks: an all-gather of the number of calls (8 bytes per micro-batch and
layer) and an all-reduce of two values per channel. One data-parallel rank does not communicate.

Used by the strategies. Legend: R data-parallel ranks, S slots of a rank, L layers, F values: mean and
variance of each channel of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.training.strategies.sync_batchnorm import SyncedBatchNorm, is_timm_batchnorm


def only_updates_statistics(module: nn.Module) -> bool:
    """Return True if a training forward of ``module`` updates running statistics without reading them.

    True for the forward of BatchNorm and timm's BatchNorm. A subclass with another forward may read them,
    like batch renormalization, so its buffers are treated like those of other modules.
    """
    return isinstance(module, _BatchNorm) and (
        type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncedBatchNorm.forward)
        or is_timm_batchnorm(module)
    )


class RunningStatistics:
    """The running statistics of the BatchNorm layers of ``model`` during a step's micro-batches.

    Excludes SyncBatchNorm, whose statistics already cover all ranks, and layers in evaluation mode (frozen),
    whose running statistics are read and not updated.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_rank: int,
        data_ranks: int,
        group: dist.ProcessGroup | None = None,
        is_counted: bool = True,
    ) -> None:
        """``model``: placed, so that its buffers remain the same tensors.

        ``group``: the ranks that train the same layers, all ranks if None. It has ``data_ranks`` ranks, or a
        multiple if neighbours share each micro-batch; exactly one of these neighbours ``is_counted``.
        """
        self._candidates = _distinct_layers(model)
        self._data_rank = data_rank
        self._data_ranks = data_ranks
        self._group = group
        self._is_counted = is_counted
        self._layers: list[_BatchNorm] = []

    def step(self, slots: int) -> AbstractContextManager[None]:
        """Return the context of the forward passes of one optimizer step. Collective.

        ``slots``: micro-batches of this rank, the same number on every rank. After an exception in the
        context the running statistics are undefined.
        """
        return self._combined(slots) if self._candidates else nullcontext()

    @contextmanager
    def _combined(self, slots: int) -> Iterator[None]:
        self._begin(slots)
        yield
        if self._layers:
            self._end()

    def micro_batch(self, slot: int, *, is_spare: bool) -> AbstractContextManager[None]:
        """Return the context of the forward of the ``slot``-th micro-batch, without other micro-batches.

        The statistics of a spare micro-batch are dropped. Not collective.
        """
        return self._recorded(slot, is_spare=is_spare) if self._layers else nullcontext()

    @contextmanager
    def _recorded(self, slot: int, *, is_spare: bool) -> Iterator[None]:
        # Through .data: a pipeline runs forwards of several micro-batches before the first backward, for
        # which autograd has saved these buffers. It does not use their values.
        for buffers in (self._statistics(), self._calls()):  # separately, because a kernel takes one dtype
            torch._foreach_zero_([buffer.data for buffer in buffers])
        yield
        if not is_spare:
            self._contributions[slot] = self._flat()
            self._calls_by_slot[slot] = torch.stack(self._calls())

    def _begin(self, slots: int) -> None:
        layers = [layer for layer in self._candidates if layer.training and layer.track_running_stats]
        if layers != self._layers:
            self._layers = layers
            self._describe()
        if not layers:
            return
        self._before = self._flat()
        self._calls_before = torch.stack(self._calls())
        self._contributions = self._before.new_zeros((slots, self._before.numel()))
        self._calls_by_slot = self._calls_before.new_zeros((slots, len(layers)))

    def _describe(self) -> None:
        if not self._layers:
            return
        device = self._calls()[0].device
        self._dtype = reduce(torch.promote_types, (x.dtype for x in self._statistics()), torch.float32)
        sizes = [2 * layer.num_features for layer in self._layers]
        #: Layer of each of the F values.
        self._layer_of = torch.repeat_interleave(
            torch.arange(len(sizes)), torch.tensor(sizes), output_size=sum(sizes)
        ).to(device)
        momenta = [layer.momentum for layer in self._layers]
        self._is_cumulative = torch.tensor([value is None for value in momenta], device=device)
        #: Factor of the previous value in one call.
        self._kept_share = torch.tensor(
            [1.0 - (value or 0.0) for value in momenta], dtype=torch.float64, device=device
        )

    @torch.no_grad()
    def _end(self) -> None:
        """Write the running statistics of all micro-batches into the buffers. Collective."""
        calls = self._calls_in_order()  # (R·S, L)
        total = calls.sum(0)
        later = total - calls.cumsum(0)  # calls after each micro-batch
        this_rank = slice(self._data_rank, None, self._data_ranks)
        weights, decay = self._weights(calls[this_rank], later[this_rank], total)
        added = (weights[:, self._layer_of].to(self._dtype) * self._contributions).sum(0)
        if not self._is_counted:
            added.zero_()
        if self._data_ranks > 1:
            dist.all_reduce(added, group=self._group)
        after = decay[self._layer_of].to(self._dtype) * self._before + added
        parts = after.split([value.numel() for value in self._statistics()])
        torch._foreach_copy_([value.data for value in self._statistics()], list(parts))
        calls_after = self._calls_before + total
        torch._foreach_copy_([value.data for value in self._calls()], list(calls_after.unbind()))

    def _statistics(self) -> list[Tensor]:
        """Return the current running mean and variance of each layer, which a forward may replace."""
        return [_buffer(layer, key) for layer in self._layers for key in ("running_mean", "running_var")]

    def _calls(self) -> list[Tensor]:
        """Return the number of calls of each layer, tensors of shape ()."""
        return [_buffer(layer, "num_batches_tracked") for layer in self._layers]

    def _flat(self) -> Tensor:
        """Return a copy of the statistics, shape (F,)."""
        return torch.cat([value.detach().to(self._dtype) for value in self._statistics()])

    def _calls_in_order(self) -> Tensor:
        """Return the calls of each layer in each micro-batch of the step, shape (S·R, L). Collective."""
        if self._data_ranks == 1:
            return self._calls_by_slot
        members = dist.get_world_size(self._group)
        rows = self._calls_by_slot.new_empty((members, *self._calls_by_slot.shape))
        dist.all_gather_into_tensor(rows.view(-1), self._calls_by_slot.view(-1), group=self._group)
        by_data_rank = rows[:: members // self._data_ranks]  # neighbours share micro-batches
        return by_data_rank.transpose(0, 1).reshape(-1, self._calls_by_slot.shape[1])

    def _weights(self, calls: Tensor, later: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each contribution of this rank, (S, L), and of the value before the step,
        (L,).

        A contribution of k calls is their sum, each with its factor; the later calls of the step scale it
        like the previous value. For a cumulative average it is their mean.
        """
        share = self._kept_share
        count = (self._calls_before + total).clamp(min=1).double()
        weights = torch.where(self._is_cumulative, calls / count, share**later)
        decay = torch.where(self._is_cumulative, 1 - total / count, share**total)
        return weights, decay


def _buffer(layer: _BatchNorm, key: str) -> Tensor:
    buffer = layer._buffers[key]
    assert buffer is not None
    return buffer


def _distinct_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers with running statistics per micro-batch; layers that share a buffer once."""
    layers: dict[int, _BatchNorm] = {}
    for module in model.modules():
        if only_updates_statistics(module) and not isinstance(module, nn.SyncBatchNorm | SyncedBatchNorm):
            assert isinstance(module, _BatchNorm)
            if module.running_mean is not None and module.num_batches_tracked is not None:
                layers.setdefault(id(module.running_mean), module)
    return list(layers.values())
