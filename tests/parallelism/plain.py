"""What every case is compared with: one process, plain PyTorch, nothing of strategies or optimization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.random_numbers import seed_build, seed_forward
from hpc_train.training.models.building import build_model
from tests.parallelism.batches import INFO, micro_batch
from tests.parallelism.cases import STEPS
from tests.parallelism.training import Trained


@dataclass(frozen=True)
class Reference:
    """What of a case the mathematics depends on: all but how ranks share it."""

    experiment: Experiment
    dtype: torch.dtype
    micro_batches: int
    #: How many data-parallel ranks share a micro-batch's statistics under SyncBatchNorm.
    data_ranks: int
    #: Steps whose gradients overflow under fp16 change no weight.
    skipped: tuple[int, ...] = ()


def train(rank: int, ranks: int, reference: Reference) -> Trained:
    """Train on one device."""
    config, dtype = reference.experiment, reference.dtype
    seed_build(config.seed)
    model = build_model(config.model, INFO).to(dtype).train()
    optimizer = _optimizer(model, config)
    peaks = [group["lr"] for group in optimizer.param_groups]
    average = {name: value.clone() for name, value in model.state_dict().items()}
    losses, gradients = [], {}
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 + math.cos(math.pi * step / STEPS)) / 2
        losses.append(_accumulate(model, step, reference))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if config.optimization.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimization.clip_grad_norm)
        if step not in reference.skipped:
            optimizer.step()
        optimizer.zero_grad()
        _average(average, model, config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    has_average = config.optimization.ema is not None
    return Trained(torch.stack(losses), gradients, weights, average if has_average else {})


def _accumulate(model: nn.Module, step: int, reference: Reference) -> Tensor:
    """Add up the gradients of the mean loss."""
    together = reference.data_ranks if reference.experiment.parallel.sync_batchnorm else 1
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, reference.micro_batches, together):
        seed_forward(reference.experiment.seed, step, first, torch.device("cpu"))
        parts = [micro_batch(step, number) for number in range(first, first + together)]
        images = torch.cat([images for images, _ in parts]).to(reference.dtype)
        logits = model(images)
        loss = functional.cross_entropy(logits, torch.cat([classes for _, classes in parts]))
        loss = loss * together / reference.micro_batches
        torch.autograd.backward(loss)
        total += loss.detach()
    return total


def _optimizer(model: nn.Module, config: Experiment) -> torch.optim.Optimizer:
    given = config.optimization.optimizer
    groups = _groups(model, given.layer_decay, given.lr, given.weight_decay or 0.0)
    if given.name == "sgd":
        momentum = given.momentum or 0.0
        return torch.optim.SGD(groups, given.lr, momentum, weight_decay=given.weight_decay or 0.0)
    assert given.name == "adamw"
    eps: Any = given.args["eps"]
    return torch.optim.AdamW(groups, given.lr, eps=eps, weight_decay=given.weight_decay or 0.0)


def _groups(
    model: nn.Module, layer_decay: float | None, lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return groups by layer as timm makes them, with its ``lr_scale`` multiplied in."""
    if layer_decay is None:
        return [{"params": list(model.parameters())}]
    made = timm.optim.param_groups_layer_decay(model, weight_decay, layer_decay=layer_decay)
    return [{"params": group["params"], "lr": lr * group["lr_scale"]} for group in made]


@torch.no_grad()
def _average(average: dict[str, Tensor], model: nn.Module, config: Experiment) -> None:
    if config.optimization.ema is None:
        return
    decay = config.optimization.ema.decay
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            average[name].copy_(decay * average[name] + (1 - decay) * value)
        else:
            average[name].copy_(value)
