"""Infers channels and classes of data sets that do not define them, from their attributes and first
sample.
"""

from __future__ import annotations

from typing import Any

import torch

from hpc_train.datasets.base import ArraySplit
from hpc_train.datasets.images import as_inputs
from hpc_train.datasets.structures import is_structured, map_tensors, tensors_of
from hpc_train.errors import BadFileError

#: Where torchvision's data sets and most others store all targets.
_TARGET_ATTRIBUTES = ("targets", "labels", "_labels")


def count_channels(split: Any) -> int:
    """Return the channels of the first image, or its features; PIL counts as gray or as colour.

    Of several inputs the first image counts; 0 where none is an image.
    """
    if len(split) == 0:
        raise BadFileError("data: the training data are empty")
    if isinstance(split, ArraySplit):
        inputs, _ = split.batch(torch.tensor([0]))
        if not is_structured(inputs):
            return int(inputs.shape[1]) if inputs.dim() > 1 else 0
    else:
        sample, _ = split[0]
        inputs = as_inputs(sample)
        if not is_structured(inputs):
            return int(inputs.shape[0])
        inputs = map_tensors(lambda part: part[None], inputs)
    images = [part for part in tensors_of(inputs) if part.dtype == torch.uint8 and part.dim() == 4]
    return int(images[0].shape[1]) if images else 0


def all_targets(split: Any) -> torch.Tensor | None:
    """Return the targets (N,) int64 that a data set stores, None if it does not."""
    for attribute in _TARGET_ATTRIBUTES:
        found = getattr(split, attribute, None)
        if found is None:
            continue
        try:
            targets = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            continue
        if targets.shape == (len(split),) and not targets.is_floating_point():
            return targets.to(torch.int64)
    return None


def count_classes(train: Any, val: Any = None) -> int:
    """Return ``num_classes`` or the length of ``classes``, else the largest target + 1.

    Raises BadFileError if the data set has none of these.
    """
    num_classes = getattr(train, "num_classes", None)
    if isinstance(num_classes, int):
        return num_classes
    names = getattr(train, "classes", None)
    if isinstance(names, (list, tuple)) and names:
        return len(names)
    targets = [all_targets(part) for part in (train, val) if part is not None]
    known = [int(part.max()) for part in targets if part is not None and len(part)]
    if not known:
        raise BadFileError(
            f"data: {type(train).__name__} does not define the number of classes; give it an attribute "
            "num_classes, classes (a list of names) or targets (a list of whole numbers), or return a "
            "DataSource"
        )
    return max(known) + 1


def name_classes(split: Any, num_classes: int) -> tuple[str, ...]:
    """Return the class names if the data set has one for each class, else nothing."""
    names = getattr(split, "classes", None)
    if not isinstance(names, (list, tuple)) or len(names) != num_classes:
        return ()
    return tuple(str(name) for name in names)
