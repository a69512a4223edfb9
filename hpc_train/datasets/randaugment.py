"""RandAugment (arXiv:1909.13719) with torchvision's operations, selected by the sample's random numbers.

Operations, ranges and the order of both are those of ``torchvision.transforms.v2.RandAugment`` with 31 bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from statistics import NormalDist

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

from hpc_train.datasets.random_numbers import Keys

#: Number of magnitudes of an operation, as in torchvision.
BINS = 31
#: Size of the table of normally distributed numbers (assumed).
_NORMAL_BINS = 4096
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


def level(name: str, magnitude: int, height: int, width: int, bins: int = BINS) -> float:
    """Return the strength of an operation at ``magnitude`` 0…bins−1, as torchvision scales it (unsigned)."""
    if name == "Posterize":
        return float(8 - round(magnitude / ((bins - 1) / 4)))
    ends = {
        "ShearX": (0.0, 0.3),
        "ShearY": (0.0, 0.3),
        "TranslateX": (0.0, _SHIFT * width),
        "TranslateY": (0.0, _SHIFT * height),
        "Rotate": (0.0, 30.0),
        "Solarize": (1.0, 0.0),
    }
    low, high = ends.get(name, (0.0, 0.9))
    return float(torch.linspace(low, high, bins)[magnitude])


def randaugment(
    images: list[Tensor],
    keys: Keys,
    num_ops: int,
    magnitude: int,
    magnitude_std: float = 0.0,
    probability: float = 1.0,
) -> list[Tensor]:
    """Apply ``num_ops`` random operations, each with ``probability``, to images (C, H, W) uint8, C 1 or 3.

    With ``magnitude_std`` the magnitude of each operation is drawn from a normal distribution around
    ``magnitude``, rounded and clipped to 0…30.
    """
    for number in range(num_ops):
        draw = f"randaugment.{number}"
        chosen = keys.integers(draw, 0, len(_NAMES)).tolist()
        applied = [True] * len(images)
        if probability < 1:
            applied = keys.flags(f"{draw}.applied", probability).tolist()
        negated = keys.flags(f"{draw}.sign", 0.5).tolist()
        magnitudes = _magnitudes(keys, f"{draw}.magnitude", magnitude, magnitude_std, len(images))
        images = [
            _apply_at(image, _NAMES[choice], strength, negative) if is_applied else image
            for image, choice, strength, negative, is_applied in zip(
                images, chosen, magnitudes, negated, applied, strict=True
            )
        ]
    return images


def _magnitudes(keys: Keys, draw: str, mean: int, std: float, count: int) -> list[int]:
    drawn = normal_numbers(keys, draw, mean, std, count)
    return [min(max(round(number), 0), BINS - 1) for number in drawn]


def normal_numbers(keys: Keys, draw: str, mean: float, std: float, count: int) -> list[float]:
    """Return a normally distributed number for each of ``count`` samples; ``mean`` if ``std`` is 0."""
    if std == 0:
        return [mean] * count
    normals = _normal_table()
    return [mean + std * normals[index] for index in keys.integers(draw, 0, len(normals)).tolist()]


@cache
def _normal_table() -> tuple[float, ...]:
    """Return equally likely values of the standard normal distribution.

    Computed by Python, so that no batch depends on a device's implementation of the inverse.
    """
    return tuple(NormalDist().inv_cdf((k + 0.5) / _NORMAL_BINS) for k in range(_NORMAL_BINS))


def _apply_at(image: Tensor, name: str, magnitude: int, negative: bool) -> Tensor:
    height, width = image.shape[-2:]
    return apply(image, name, level(name, magnitude, height, width), negative)


def apply(image: Tensor, name: str, strength: float, negative: bool) -> Tensor:
    """Apply the operation ``name``, negated if it has a sign and ``negative`` is true."""
    operation, is_signed = OPERATIONS[name]
    return operation(image, -strength if is_signed and negative else strength)
