"""Infers facts that a data set does not define: channels and classes from its attributes and first sample,
mean and standard deviation from its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.base import ArraySplit
from hpc_train.training.datasets.images import as_inputs, inputs_and_target
from hpc_train.training.datasets.targets import as_targets
from hpc_train.training.datasets.types import DataInfo, is_structured, map_tensors, tensors_of

#: Attributes in which torchvision's data sets and most others store all targets.
_TARGET_ATTRIBUTES = ("targets", "labels", "_labels")
#: Per channel, for images scaled to 0…1.
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
#: Numbers of channels of gray and color images, with and without alpha.
_COLORS = (1, 3, 4)
#: ImageNet in gray, with the weights of luminance.
_GRAY_MEAN, _GRAY_STD = (0.459,), (0.226,)

_BY_NAME = {
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "MNIST": ((0.1307,), (0.3081,)),
    "FashionMNIST": ((0.2860,), (0.3530,)),
    "KMNIST": ((0.1918,), (0.3483,)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}


def infer_info(name: str, train: Any, val: Any) -> DataInfo:
    """Return the information on a data set that defines none."""
    channels, num_classes = count_channels(train), count_classes(train, val)
    mean, std = mean_and_std(channels, name)
    _check_same_classes(train, val)
    names = name_classes(train, num_classes)
    return DataInfo(num_classes, channels, mean, std, names, target_shape=shape_of_targets(train))


def shape_of_targets(split: Any) -> tuple[int, ...]:
    """Return () or (K,), the shape of the first sample's target; () also for any other target."""
    target = _first_target(split)
    return tuple(target.shape) if target is not None and target.dim() == 1 else ()


def _first_target(split: Any) -> torch.Tensor | None:
    """Return the target of the first sample; None if it is not a single tensor."""
    try:
        if isinstance(split, ArraySplit):
            target = map_tensors(lambda part: part[0], split.batch(torch.tensor([0]))[1])
        else:
            target = as_targets(split[0][1])
    except (TypeError, ValueError, RuntimeError):
        return None  # reading the samples reports the one without a valid target
    return target if isinstance(target, torch.Tensor) else None


def count_channels(split: Any) -> int:
    """Return the channels of the first image, or its features; PIL images are gray or colour.

    With several inputs, the channels of the first image; 0 if none is an image.
    """
    if len(split) == 0:
        raise BadFileError("data: the training data are empty")
    if isinstance(split, ArraySplit):
        inputs, _ = split.batch(torch.tensor([0]))
        if not is_structured(inputs):
            return _channels(tuple(inputs.shape[1:])) if inputs.dim() > 1 else 0
    else:
        sample, _ = inputs_and_target(split[0])
        inputs = as_inputs(sample)
        if not is_structured(inputs):
            return _channels(tuple(inputs.shape))
        inputs = map_tensors(lambda part: part[None], inputs)
    images = [part for part in tensors_of(inputs) if part.dtype == torch.uint8 and part.dim() == 4]
    return int(images[0].shape[1]) if images else 0


def _channels(shape: tuple[int, ...]) -> int:
    """Return C of (C, H, W) or (F,). Raises BadFileError if H or W is clearly the number of channels."""
    if len(shape) != 3 or shape[0] in _COLORS:
        return shape[0]
    short, long = sorted(shape[1:])
    is_gray = short == 1 and long == shape[0] > 4
    if is_gray or (short in _COLORS[1:] and long > 4):
        raise BadFileError(
            f"data: the first image has {shape[0]} channels of {shape[1]}x{shape[2]} pixels; return tensors "
            "of (C, H, W), or arrays of (H, W, C)"
        )
    return shape[0]


def all_targets(split: Any) -> torch.Tensor | None:
    """Return the targets (N,) int64 that a data set stores, or None."""
    for attribute in _TARGET_ATTRIBUTES:
        stored = getattr(split, attribute, None)
        if stored is None:
            continue
        try:
            targets = torch.as_tensor(stored)
        except (TypeError, ValueError, RuntimeError):
            continue
        if targets.shape == (len(split),) and not targets.is_floating_point():
            return targets.to(torch.int64)
    return None


def count_classes(train: Any, val: Any) -> int:
    """Return ``num_classes`` or the length of ``classes``, else the largest training target + 1; for
    vector targets their length, for numbers 1.

    Raises BadFileError if the data set has none of these, or the validation data have more classes.
    """
    num_classes = getattr(train, "num_classes", None)
    if isinstance(num_classes, int):
        return num_classes
    names = getattr(train, "classes", None)
    if isinstance(names, (list, tuple)) and names:
        return len(names)
    if outputs := _num_outputs(train):
        return outputs
    targets = [all_targets(part) for part in (train, val) if part is not None]
    maxima = [int(part.max()) for part in targets if part is not None and len(part)]
    if not maxima:
        raise BadFileError(
            f"data: {type(train).__name__} does not define the number of classes; give it an attribute "
            "num_classes, classes (a list of names) or targets (a list of whole numbers), or return a "
            "DataSource"
        )
    if maxima[-1] > maxima[0]:
        raise BadFileError(
            f"data: the validation data have the class {maxima[-1]}, and the largest of the training data is "
            f"{maxima[0]}; fix the targets, or give the data set an attribute num_classes"
        )
    return maxima[0] + 1


def _check_same_classes(train: Any, val: Any) -> None:
    """Raise BadFileError if training and validation data list different classes, or in another order."""
    ours, theirs = (getattr(split, "classes", None) for split in (train, val))
    if not all(isinstance(names, (list, tuple)) for names in (ours, theirs)):
        return
    if list(ours or ()) != list(theirs or ()):
        pairs = itertools.zip_longest(ours or (), theirs or ())
        number, (first, second) = next(
            (number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]
        )
        raise BadFileError(
            f"data: class {number} is {first!r:.60} in the training data and {second!r:.60} in the "
            "validation data (their classes); make both lists equal"
        )


def _num_outputs(split: Any) -> int | None:
    """Return the number of values of a target that is not a class; None if it is or may be one."""
    target = _first_target(split) if len(split) else None
    if target is None or target.dim() > 1 or not (target.dim() or target.is_floating_point()):
        return None
    return target.numel()


def name_classes(split: Any, num_classes: int) -> tuple[str, ...]:
    """Return the class names if the data set has one for each class, else ()."""
    names = getattr(split, "classes", None)
    if not isinstance(names, (list, tuple)) or len(names) != num_classes:
        return ()
    return tuple(str(name) for name in names)


def image_info(
    names: Sequence[str],
    channels: int,
    num_classes: int | None = None,
    target_shape: tuple[int, ...] = (),
    ignore_index: int | None = None,
) -> DataInfo:
    """Return the information on image files. ``num_classes``: default one per name."""
    mean, std = mean_and_std(channels)
    count = len(names) if num_classes is None else num_classes
    return DataInfo(count, channels, mean, std, tuple(names), None, ignore_index, target_shape)


def mean_and_std(channels: int, name: str = "") -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of torchvision's data set ``name``, or ImageNet's.

    Returns 0.5 and 0.25 unless ``channels`` is 1 or 3.
    """
    statistics = _BY_NAME.get(name)
    if statistics is not None and len(statistics[0]) == channels:
        return statistics
    if channels == 3:
        return _IMAGENET_MEAN, _IMAGENET_STD
    if channels == 1:
        return _GRAY_MEAN, _GRAY_STD
    return (0.5,) * channels, (0.25,) * channels
