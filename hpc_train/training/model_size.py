"""How much memory a model's weights take, found without allocating them, for ``prepare`` on a login node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from hpc_train.config.training_sections import ModelConfig
from hpc_train.datasets.types import DataInfo
from hpc_train.models.building import build_model
from hpc_train.training.forked_call import ForkedCall
from hpc_train.training.free_memory import free_bytes, limit_memory

#: Why a model can't be built or run where its size was not known before.
MEMORY_RAN_OUT = "the memory that is free here does not suffice"
#: A model of the user's own may read its weights meanwhile. Assumed.
_LIMIT_S = 120.0
_GB = 1e9


def lacking_memory(nbytes: int) -> str | None:
    """Return why weights of this size can't be used on this machine now; None if they can."""
    free = free_bytes()
    if nbytes <= free:
        return None
    return f"its weights have {nbytes / _GB:.1f} GB, and {free / _GB:.1f} GB of memory are free here"


def weight_bytes(model: nn.Module) -> int:
    """Return the size of parameters and buffers, on whatever device."""
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def planned_weight_bytes(config: ModelConfig, info: DataInfo) -> int | None:
    """Return the size of the model's weights, built on the meta device; None where it can't be built there.

    In a forked child, which may allocate no more than is free: code of the user's may read a file of weights.
    """
    call = ForkedCall(lambda: _measure(config, info))
    try:
        return cast("int | None", call.result()) if call.has_ended(_LIMIT_S) else None
    finally:
        call.close()


def _measure(config: ModelConfig, info: DataInfo) -> int:
    limit_memory(torch.device("cpu"), num_sharing=1)
    with torch.device("meta"):
        return weight_bytes(build_model(config.model_copy(update={"pretrained": False}), info))
