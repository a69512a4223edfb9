"""BatchNorm under data parallelism: ``parallel.sync_batchnorm``, and running statistics.

``sync_batchnorm`` normalizes over one micro-batch of every rank at once; ``train_state.assemble`` calls it
between building and placing the model.

``RunningStatistics``, used by the strategies, makes the running statistics equal to those of one process that
trains all micro-batches in order. Each rank runs only some of a step's micro-batches: otherwise running mean
and variance would be those of its share, and the evaluated and saved model would depend on the number of
ranks. A training forward updates a running value x by an affine rule, x ← (1−f)·x + f·s, with the batch
statistic s and the factor f of ``momentum`` (a cumulative average for ``momentum=None``), and never reads x.
So during a step the buffers serve as scratch memory: they are zero before each micro-batch and hold its
contribution after it. At the end of the step the contributions of all ranks are combined in the order of the
micro-batches, and the buffers hold the running values again. Cost per step, for any number of ranks: an
all-gather of the number of calls (8 bytes per micro-batch and layer) and an all-reduce of two values per
channel. One data-parallel rank does not communicate.

Legend: R data-parallel ranks, S slots of a rank, L layers, C channels, F values: mean and variance of each
channel of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.errors import BadFileError
from hpc_train.experiment.validate.compatibility import uneven_sync_batchnorm
from hpc_train.training.models.fine_tuning import is_kept_in_evaluation


def sync_batchnorm(model: nn.Module, device: torch.device, micro_batches: int) -> nn.Module:
    """Replace the BatchNorm layers that are not frozen, with the same names and tensors; return the model.

    Not collective, but makes forwards collective: all ranks must run the same forwards. Uses torch's layers
    on CUDA, and ``SyncedBatchNorm`` on the CPU, which torch's do not support. No change on a single rank.

    Raises BadFileError if ``micro_batches`` of a step leave spare slots, whose samples would count twice.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if problem := uneven_sync_batchnorm(micro_batches, ranks):
        raise problem.as_error()
    if ranks == 1:
        return model
    replaced: dict[nn.Module, nn.Module] = {}  # a layer under two names is replaced once
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm | SyncedBatchNorm) or is_kept_in_evaluation(layer):
            continue
        if isinstance(layer, _BatchNorm):
            replaced[layer] = _synced(layer, name, device)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


def has_batchnorm(model: nn.Module) -> bool:
    """Return True if a module normalizes over a micro-batch, including timm's variants and SyncBatchNorm."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _synced(layer: _BatchNorm, name: str, device: torch.device) -> nn.Module:
    make = _kind(layer, name, device)
    new = make(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    new._parameters, new._buffers = layer._parameters, layer._buffers
    # timm's layer contains an activation and a dropout.
    new._modules = layer._modules
    return new.train(layer.training)


def _kind(layer: _BatchNorm, name: str, device: torch.device) -> Callable[..., nn.Module]:
    """Return the class that replaces the layer's; raises BadFileError for a class with another forward."""
    is_timms = is_timm_batchnorm(layer)
    if not is_timms and type(layer).forward is not _BatchNorm.forward:
        raise BadFileError(
            f"parallel.sync_batchnorm: {name} is a {type(layer).__name__}, which normalises in its own way; "
            "write false, or have the model use nn.BatchNorm2d"
        )
    if device.type == "cpu":
        return SyncedBatchNorm
    if is_timms:
        from timm.layers.norm_act import SyncBatchNormAct

        return SyncBatchNormAct
    return nn.SyncBatchNorm


def is_timm_batchnorm(layer: nn.Module) -> bool:
    """Return True for timm's BatchNorm with an activation, without importing timm for other models."""
    kind = type(layer)
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics cover the inputs of all ranks."""

    def _check_input_dim(self, inputs: Tensor) -> None:
        if inputs.dim() < 2:
            raise ValueError(f"expected at least 2 dims, got {inputs.dim()}")

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize (B, C, …). Collective in training; not in evaluation, as ranks have unequal batches."""
        self._check_input_dim(inputs)
        uses_batch = self.training or self.running_mean is None
        output = self._normalise(inputs) if uses_batch and self.training else self._plain(inputs, uses_batch)
        for child in self.children():  # timm's dropout, then its activation
            output = child(output)
        return output

    def _plain(self, inputs: Tensor, uses_batch: bool) -> Tensor:
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, 0.0, self.eps
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _normalise(self, inputs: Tensor) -> Tensor:
        # Sums of bf16 or fp16 numbers would lose precision; F.batch_norm does the same.
        wide = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
        mean, var, count = _statistics_of_all_ranks(wide)
        self._track(mean.detach(), var.detach(), count)
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        output = (wide - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(inputs.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running statistics with the unbiased variance, like nn.BatchNorm."""
        if not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def _statistics_of_all_ranks(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and (biased) variance of each channel, shape (C,), and the number of values per channel.

    Combines the ranks' means and squared deviations (Chan et al. 1979), which avoids the cancellation of sums
    of squares and is the same arithmetic on all ranks.
    """
    var_here, mean_here = torch.var_mean(inputs.transpose(0, 1).flatten(1), dim=1, correction=0)
    count_here = mean_here.new_full((1,), inputs.numel() // inputs.shape[1])
    rows = _Gather.apply(torch.cat([mean_here, var_here, count_here]))  # (R, 2C + 1)
    counts = rows[:, -1:].detach()
    means, variances = rows[:, :-1].chunk(2, dim=1)
    count = counts.sum()
    if count <= 1:
        raise ValueError(
            f"one number a channel on all ranks together can't be normalised: {tuple(inputs.shape)}"
        )
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, var, count


class _Gather(torch.autograd.Function):
    """Every rank's vector as rows. Each rank's loss depends on all rows: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: object, vector: Tensor) -> Tensor:
        rows = vector.new_empty((dist.get_world_size(), vector.numel()))
        dist.all_gather_into_tensor(rows.view(-1), vector.contiguous())
        return rows

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank()]


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
