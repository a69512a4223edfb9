"""Data sets with all images in one array (CIFAR, MNIST, SVHN, …), read as whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.datasets.base import AnySplit, TensorSplit
from hpc_train.datasets.images import as_tensor
from hpc_train.datasets.sources.infer import all_targets
from hpc_train.datasets.targets import as_target

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def in_memory(split: Any) -> AnySplit:
    """Return a TensorSplit of the same samples if ``split`` has them in ``data``; else ``split`` itself.

    The array is compared with the results of ``__getitem__`` for the first and the last sample, in each
    layout that the shape allows.
    """
    images, targets = _bytes(getattr(split, "data", None), len(split)), all_targets(split)
    if images is None or targets is None:
        return split
    for candidate in _layouts(images):
        if all(_agrees(split, candidate, targets, index) for index in {0, len(split) - 1}):
            return TensorSplit(candidate.contiguous(), targets)
    return split


def _bytes(data: Any, count: int) -> Tensor | None:
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data) if data.dtype == np.uint8 else None
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or count == 0 or len(data) != count:
        return None
    return data


def _layouts(images: Tensor) -> list[Tensor]:
    """Return the array as (N, C, H, W) in each way that its shape allows."""
    if images.dim() == 3:
        return [images[:, None]]
    if images.dim() != 4:
        return []
    return [images.permute(0, 3, 1, 2), images]


def _agrees(split: Any, images: Tensor, targets: Tensor, index: int) -> bool:
    image, target = split[index]
    return torch.equal(as_tensor(image), images[index]) and _is_class(target, int(targets[index]))


def _is_class(target: Any, number: int) -> bool:
    """Return True if ``__getitem__`` returns that class; with a ``target_transform`` it may not."""
    try:
        value = as_target(target)
    except (TypeError, ValueError, RuntimeError):
        return False
    return value.shape == () and value.dtype in _INTEGERS and int(value) == number
