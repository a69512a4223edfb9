"""AutoAugment (arXiv:1805.09501) and TrivialAugment (arXiv:2103.10158) with the sample's random numbers.

Operations, ranges and sub-policies are those of ``torchvision.transforms.v2.AutoAugment`` and
``TrivialAugmentWide``. The tables are copied, so that a run does not depend on torchvision's version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

from hpc_train.datasets.randaugment import BINS, OPERATIONS, apply, level
from hpc_train.datasets.random_numbers import Keys

_AUTOAUGMENT_BINS = 10
_NAMES = tuple(OPERATIONS)
#: TrivialAugment's ranges that differ from 0…0.99; in pixels, degrees, and fractions of 255.
_WIDE = {
    "TranslateX": (0.0, 32.0),
    "TranslateY": (0.0, 32.0),
    "Rotate": (0.0, 135.0),
    "Solarize": (1.0, 0.0),
}
_WIDE_DEFAULT = (0.0, 0.99)
#: TrivialAugment keeps at least two bits per channel.
_WIDE_POSTERIZE = 6


@dataclass(frozen=True)
class Operation:
    """An operation of a sub-policy: applied with a probability, at a magnitude 0…9 (0 if it has none)."""

    name: str
    probability: float
    magnitude: int


def _sub_policies(text: str) -> tuple[tuple[Operation, ...], ...]:
    """Return the sub-policies of a table with one per line: ``name probability magnitude, …``."""
    lines = (line.split(",") for line in text.strip().splitlines())
    return tuple(tuple(map(_operation, operations)) for operations in lines)


def _operation(text: str) -> Operation:
    name, probability, magnitude = text.split()
    return Operation(name, float(probability), 0 if magnitude == "-" else int(magnitude))


#: Name of the policy → its sub-policies.
AUTOAUGMENT = {
    "autoaugment": _sub_policies(
        """
        Posterize 0.4 8, Rotate 0.6 9
        Solarize 0.6 5, AutoContrast 0.6 -
        Equalize 0.8 -, Equalize 0.6 -
        Posterize 0.6 7, Posterize 0.6 6
        Equalize 0.4 -, Solarize 0.2 4
        Equalize 0.4 -, Rotate 0.8 8
        Solarize 0.6 3, Equalize 0.6 -
        Posterize 0.8 5, Equalize 1 -
        Rotate 0.2 3, Solarize 0.6 8
        Equalize 0.6 -, Posterize 0.4 6
        Rotate 0.8 8, Color 0.4 0
        Rotate 0.4 9, Equalize 0.6 -
        Equalize 0 -, Equalize 0.8 -
        Invert 0.6 -, Equalize 1 -
        Color 0.6 4, Contrast 1 8
        Rotate 0.8 8, Color 1 2
        Color 0.8 8, Solarize 0.8 7
        Sharpness 0.4 7, Invert 0.6 -
        ShearX 0.6 5, Equalize 1 -
        Color 0.4 0, Equalize 0.6 -
        Equalize 0.4 -, Solarize 0.2 4
        Solarize 0.6 5, AutoContrast 0.6 -
        Invert 0.6 -, Equalize 1 -
        Color 0.6 4, Contrast 1 8
        Equalize 0.8 -, Equalize 0.6 -
        """
    ),
    "autoaugment_cifar10": _sub_policies(
        """
        Invert 0.1 -, Contrast 0.2 6
        Rotate 0.7 2, TranslateX 0.3 9
        Sharpness 0.8 1, Sharpness 0.9 3
        ShearY 0.5 8, TranslateY 0.7 9
        AutoContrast 0.5 -, Equalize 0.9 -
        ShearY 0.2 7, Posterize 0.3 7
        Color 0.4 3, Brightness 0.6 7
        Sharpness 0.3 9, Brightness 0.7 9
        Equalize 0.6 -, Equalize 0.5 -
        Contrast 0.6 7, Sharpness 0.6 5
        Color 0.7 7, TranslateX 0.5 8
        Equalize 0.3 -, AutoContrast 0.4 -
        TranslateY 0.4 3, Sharpness 0.2 6
        Brightness 0.9 6, Color 0.2 8
        Solarize 0.5 2, Invert 0 -
        Equalize 0.2 -, AutoContrast 0.6 -
        Equalize 0.2 -, Equalize 0.6 -
        Color 0.9 9, Equalize 0.6 -
        AutoContrast 0.8 -, Solarize 0.2 8
        Brightness 0.1 3, Color 0.7 0
        Solarize 0.4 5, AutoContrast 0.9 -
        TranslateY 0.9 9, TranslateY 0.7 9
        AutoContrast 0.9 -, Solarize 0.8 3
        Equalize 0.8 -, Invert 0.1 -
        TranslateY 0.7 9, AutoContrast 0.9 -
        """
    ),
    "autoaugment_svhn": _sub_policies(
        """
        ShearX 0.9 4, Invert 0.2 -
        ShearY 0.9 8, Invert 0.7 -
        Equalize 0.6 -, Solarize 0.6 6
        Invert 0.9 -, Equalize 0.6 -
        Equalize 0.6 -, Rotate 0.9 3
        ShearX 0.9 4, AutoContrast 0.8 -
        ShearY 0.9 8, Invert 0.4 -
        ShearY 0.9 5, Solarize 0.2 6
        Invert 0.9 -, AutoContrast 0.8 -
        Equalize 0.6 -, Rotate 0.9 3
        ShearX 0.9 4, Solarize 0.3 3
        ShearY 0.8 8, Invert 0.7 -
        Equalize 0.9 -, TranslateY 0.6 6
        Invert 0.9 -, Equalize 0.6 -
        Contrast 0.3 3, Rotate 0.8 4
        Invert 0.8 -, TranslateY 0 2
        ShearY 0.7 6, Solarize 0.4 8
        Invert 0.6 -, Rotate 0.8 4
        ShearY 0.3 7, TranslateX 0.9 3
        ShearX 0.1 6, Invert 0.6 -
        Solarize 0.7 2, TranslateY 0.6 7
        ShearY 0.8 4, Invert 0.8 -
        ShearX 0.7 9, TranslateY 0.8 3
        ShearY 0.8 5, AutoContrast 0.7 -
        ShearX 0.7 2, Invert 0.1 -
        """
    ),
}


def augmented(images: list[Tensor], keys: Keys, policy: str) -> list[Tensor]:
    """Apply ``policy`` to each image, (C, H, W) uint8 with 1 or 3 channels."""
    if policy == "trivialaugment":
        return _trivialaugment(images, keys)
    return _autoaugment(images, keys, policy)


def _trivialaugment(images: list[Tensor], keys: Keys) -> list[Tensor]:
    chosen = keys.integers("trivialaugment", 0, len(_NAMES)).tolist()
    bins = keys.integers("trivialaugment.magnitude", 0, BINS).tolist()
    negated = keys.flags("trivialaugment.sign", 0.5).tolist()
    return [
        apply(image, _NAMES[choice], wide_level(_NAMES[choice], magnitude), negative)
        for image, choice, magnitude, negative in zip(images, chosen, bins, negated, strict=True)
    ]


def wide_level(name: str, magnitude: int) -> float:
    """Return the strength of an operation of TrivialAugment at ``magnitude`` 0…30 (unsigned)."""
    if name == "Posterize":
        return float(8 - round(magnitude / ((BINS - 1) / _WIDE_POSTERIZE)))
    return float(torch.linspace(*_WIDE.get(name, _WIDE_DEFAULT), BINS)[magnitude])


def _autoaugment(images: list[Tensor], keys: Keys, policy: str) -> list[Tensor]:
    policies = AUTOAUGMENT[policy]
    chosen = keys.integers(policy, 0, len(policies)).tolist()
    for number in range(len(policies[0])):
        uniform = keys.uniform(f"{policy}.{number}").tolist()
        negated = keys.flags(f"{policy}.{number}.sign", 0.5).tolist()
        images = [
            _applied(image, policies[choice][number], drawn, negative)
            for image, choice, drawn, negative in zip(images, chosen, uniform, negated, strict=True)
        ]
    return images


def _applied(image: Tensor, operation: Operation, drawn: float, negative: bool) -> Tensor:
    if drawn >= operation.probability:
        return image
    if operation.name == "Invert":
        return tvf.invert(image)
    height, width = image.shape[-2:]
    strength = level(operation.name, operation.magnitude, height, width, _AUTOAUGMENT_BINS)
    return apply(image, operation.name, strength, negative)
