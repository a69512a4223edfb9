"""Makes a step on the (fake) CPU allocate as on a GPU, for operations whose rules in torch differ.

``training.memory_prediction`` runs under it. Three rules matter. Under autocast CUDA computes norms, softmax
and losses in float32 and the CPU does not (docs.pytorch.org, "Autocast Op Reference"). CUDA's fused attention
kernels drop weights without storing them, while the CPU falls back to a kernel that stores all of them. And
optimizers on CUDA update all parameters at once, with temporary results for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

#: Functions of the list "autocast to float32" that models use, with their modules. A TorchFunctionMode would
#: not be active in backward, when checkpointed blocks are recomputed.
_IN_FLOAT32 = (
    (functional, "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss"),
    (functional, "smooth_l1_loss binary_cross_entropy_with_logits kl_div"),
    (torch, "softmax log_softmax logsumexp cumsum pow exp log rsqrt"),
    (Tensor, "softmax log_softmax logsumexp cumsum pow exp log rsqrt"),
)
_HALF = (torch.bfloat16, torch.float16)
_Function = Callable[..., Any]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Apply CUDA's rules within this context."""
    attention = functional.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(functional, "scaled_dot_product_attention", _without_dropout(attention))
        )
        for owner, names in _IN_FLOAT32:
            for name in names.split():
                stack.enter_context(patch.object(owner, name, _in_float32(getattr(owner, name))))
        yield


def choose_kernels_of_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Use ``foreach`` in groups for which the file chooses no kernel, as torch does on CUDA.

    On the CPU torch would update them one by one (``torch.optim.optimizer._default_to_fused_or_foreach``).
    """
    for group in optimizer.param_groups:
        is_chosen = group.get("foreach", False) is not None or group.get("fused")
        if not is_chosen and not any(isinstance(value, DTensor) for value in group["params"]):
            group["foreach"] = not group.get("differentiable", False)


def _in_float32(function: _Function) -> _Function:
    """Return a function that computes tensors cast down by autocast in float32."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _as_float32, (args, kwargs))
        return function(*args, **kwargs)

    return computed


def _without_dropout(attention: _Function) -> _Function:
    """Return an attention without dropout; it needs as much memory as CUDA's with dropout."""

    def computed(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Any:
        kwargs |= dict(zip(("dropout_p", "is_causal"), rest, strict=False))
        mask = kwargs.pop("attn_mask", mask)
        return attention(query, key, value, mask, **kwargs | {"dropout_p": 0.0})

    return computed


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
