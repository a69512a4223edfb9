"""RandAugment (arXiv:1909.13719) with torchvision's operations, selected by the sample's own random numbers.

Operations, ranges and the order of both are those of ``torchvision.transforms.v2.RandAugment`` with 31 bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

from hpc_train.datasets.random_numbers import Keys

_BINS = 31
#: torchvision's maximum shift, as a fraction of the image's side.
_SHIFT = 150.0 / 331.0


def _affine(
    image: Tensor,
    *,
    translate: tuple[int, int] = (0, 0),
    shear: tuple[float, float] = (0.0, 0.0),
    center: list[float] | None = None,
) -> Tensor:
    moved: Tensor = tvf.affine(
        image, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center
    )
    return moved


def _shear_x(image: Tensor, level: float) -> Tensor:
    return _affine(image, shear=(math.degrees(math.atan(level)), 0.0), center=[0.0, 0.0])


def _shear_y(image: Tensor, level: float) -> Tensor:
    return _affine(image, shear=(0.0, math.degrees(math.atan(level))), center=[0.0, 0.0])


def _translate_x(image: Tensor, level: float) -> Tensor:
    return _affine(image, translate=(int(level), 0))


def _translate_y(image: Tensor, level: float) -> Tensor:
    return _affine(image, translate=(0, int(level)))


def _factor(adjust: Callable[[Tensor, float], Tensor], image: Tensor, level: float) -> Tensor:
    return adjust(image, 1.0 + level)


def _posterize(image: Tensor, level: float) -> Tensor:
    return tvf.posterize(image, bits=int(level))


def _solarize(image: Tensor, level: float) -> Tensor:
    return tvf.solarize(image, threshold=255.0 * level)


def _identity(image: Tensor, level: float) -> Tensor:
    return image


def _auto_contrast(image: Tensor, level: float) -> Tensor:
    return tvf.autocontrast(image)


def _equalize(image: Tensor, level: float) -> Tensor:
    return tvf.equalize(image)


#: Name → the operation, and whether its level is negated in half of the cases.
OPERATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], bool]] = {
    "Identity": (_identity, False),
    "ShearX": (_shear_x, True),
    "ShearY": (_shear_y, True),
    "TranslateX": (_translate_x, True),
    "TranslateY": (_translate_y, True),
    "Rotate": (tvf.rotate, True),
    "Brightness": (partial(_factor, tvf.adjust_brightness), True),
    "Color": (partial(_factor, tvf.adjust_saturation), True),
    "Contrast": (partial(_factor, tvf.adjust_contrast), True),
    "Sharpness": (partial(_factor, tvf.adjust_sharpness), True),
    "Posterize": (_posterize, False),
    "Solarize": (_solarize, False),
    "AutoContrast": (_auto_contrast, False),
    "Equalize": (_equalize, False),
}
_NAMES = tuple(OPERATIONS)


def level(name: str, magnitude: int, height: int, width: int) -> float:
    """Return the strength of an operation at ``magnitude`` 0…30, as torchvision scales it (unsigned)."""
    if name == "Posterize":
        return float(8 - round(magnitude / ((_BINS - 1) / 4)))
    ends = {
        "ShearX": (0.0, 0.3),
        "ShearY": (0.0, 0.3),
        "TranslateX": (0.0, _SHIFT * width),
        "TranslateY": (0.0, _SHIFT * height),
        "Rotate": (0.0, 30.0),
        "Solarize": (1.0, 0.0),
    }
    low, high = ends.get(name, (0.0, 0.9))
    return float(torch.linspace(low, high, _BINS)[magnitude])


def randaugment(images: list[Tensor], keys: Keys, num_ops: int, magnitude: int) -> list[Tensor]:
    """Apply ``num_ops`` random operations to each image, (C, H, W) uint8 with 1 or 3 channels."""
    for number in range(num_ops):
        chosen = keys.integers(f"randaugment.{number}", 0, len(_NAMES)).tolist()
        negated = keys.flags(f"randaugment.{number}.sign", 0.5).tolist()
        images = [
            _apply(image, _NAMES[choice], magnitude, negative)
            for image, choice, negative in zip(images, chosen, negated, strict=True)
        ]
    return images


def _apply(image: Tensor, name: str, magnitude: int, negative: bool) -> Tensor:
    operation, is_signed = OPERATIONS[name]
    height, width = image.shape[-2:]
    strength = level(name, magnitude, height, width)
    return operation(image, -strength if is_signed and negative else strength)
