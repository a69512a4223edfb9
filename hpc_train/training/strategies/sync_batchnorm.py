"""``parallel.sync_batchnorm``: BatchNorm over one micro-batch of every rank at once.

``train_state.assemble`` calls it between building and placing the model. Legend: R ranks, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

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
