"""Questions about a model that strategies, training and ``plan`` ask before it is placed."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_batchnorm(model: nn.Module) -> bool:
    """Tell whether any part normalises over a micro-batch (timm's fused variants and SyncBatchNorm count)."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())
