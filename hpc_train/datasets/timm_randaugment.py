"""RandAugment with timm's operations whose strength increases with the magnitude (``rand-m9-mstd0.5-inc1``).

Operations, their order, ranges and probability are those of ``timm.data.auto_augment``; magnitudes are 0…10,
not rounded. Images stay tensors: rotations, shears and shifts are bilinear, and fill with gray.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from hpc_train.datasets.randaugment import normal_numbers
from hpc_train.datasets.random_numbers import Keys

MAX_MAGNITUDE = 10
PROBABILITY = 0.5
#: timm's default.
_FILL = 128.0
#: SolarizeAdd changes darker pixels only.
_DARK = 128

#: Strength 0…1, whether to negate, height and width → the operation's argument.
_Argument = Callable[[float, bool, int, int], float]


def _signed(most: float, strength: float, negative: bool, height: int, width: int) -> float:
    return -most * strength if negative else most * strength


def _shift(axis: int, strength: float, negative: bool, height: int, width: int) -> float:
    return _signed(0.45 * (height, width)[axis], strength, negative, height, width)


def _factor(strength: float, negative: bool, height: int, width: int) -> float:
    return max(0.1, 1.0 + _signed(0.9, strength, negative, height, width))


def _bits(strength: float, negative: bool, height: int, width: int) -> float:
    return 4 - int(strength * 4)


def _threshold(strength: float, negative: bool, height: int, width: int) -> float:
    return 256 - int(strength * 256)


def _addend(strength: float, negative: bool, height: int, width: int) -> float:
    return int(strength * 110)


def _nothing(strength: float, negative: bool, height: int, width: int) -> float:
    return 0.0


def _without(operation: Callable[[Tensor], Tensor], image: Tensor, argument: float) -> Tensor:
    return operation(image)


def _rotate(image: Tensor, degrees: float) -> Tensor:
    rotated: Tensor = tvf.rotate(image, degrees, interpolation=InterpolationMode.BILINEAR, fill=_FILL)
    return rotated


def _affine(
    image: Tensor, translate: tuple[float, float] = (0.0, 0.0), shear: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    moved: Tensor = tvf.affine(
        image, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=[0.0, 0.0],
        interpolation=InterpolationMode.BILINEAR, fill=_FILL,
    )  # fmt: skip
    return moved


def _shear_x(image: Tensor, factor: float) -> Tensor:
    return _affine(image, shear=(math.degrees(math.atan(factor)), 0.0))


def _shear_y(image: Tensor, factor: float) -> Tensor:
    return _affine(image, shear=(0.0, math.degrees(math.atan(factor))))


def _translate_x(image: Tensor, pixels: float) -> Tensor:
    return _affine(image, translate=(-pixels, 0.0))


def _translate_y(image: Tensor, pixels: float) -> Tensor:
    return _affine(image, translate=(0.0, -pixels))


def _posterize(image: Tensor, bits: float) -> Tensor:
    posterized: Tensor = tvf.posterize(image, bits=int(bits))
    return posterized


def _solarize(image: Tensor, threshold: float) -> Tensor:
    # As a uint8, 256 would be 0.
    return image if threshold > 255 else torch.where(image >= threshold, 255 - image, image)


def _solarize_add(image: Tensor, addend: float) -> Tensor:
    return torch.where(image < _DARK, image + int(addend), image)


#: Name → the operation and its argument.
OPERATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], _Argument]] = {
    "AutoContrast": (partial(_without, tvf.autocontrast), _nothing),
    "Equalize": (partial(_without, tvf.equalize), _nothing),
    "Invert": (partial(_without, tvf.invert), _nothing),
    "Rotate": (_rotate, partial(_signed, 30.0)),
    "PosterizeIncreasing": (_posterize, _bits),
    "SolarizeIncreasing": (_solarize, _threshold),
    "SolarizeAdd": (_solarize_add, _addend),
    "ColorIncreasing": (tvf.adjust_saturation, _factor),
    "ContrastIncreasing": (tvf.adjust_contrast, _factor),
    "BrightnessIncreasing": (tvf.adjust_brightness, _factor),
    "SharpnessIncreasing": (tvf.adjust_sharpness, _factor),
    "ShearX": (_shear_x, partial(_signed, 0.3)),
    "ShearY": (_shear_y, partial(_signed, 0.3)),
    "TranslateXRel": (_translate_x, partial(_shift, 1)),
    "TranslateYRel": (_translate_y, partial(_shift, 0)),
}
_NAMES = tuple(OPERATIONS)


def timm_randaugment(
    images: list[Tensor],
    keys: Keys,
    num_ops: int,
    magnitude: int,
    magnitude_std: float = 0.0,
    probability: float = PROBABILITY,
) -> list[Tensor]:
    """Apply ``num_ops`` random operations, each with ``probability``, to images (C, H, W) uint8, C 1 or 3.

    With ``magnitude_std`` the magnitude of each is drawn from a normal distribution around ``magnitude`` and
    clipped to 0…10.
    """
    for number in range(num_ops):
        draw = f"timm_randaugment.{number}"
        chosen = keys.integers(draw, 0, len(_NAMES)).tolist()
        applied = keys.flags(f"{draw}.applied", probability).tolist()
        negated = keys.flags(f"{draw}.sign", 0.5).tolist()
        magnitudes = normal_numbers(keys, f"{draw}.magnitude", magnitude, magnitude_std, len(images))
        images = [
            apply(image, _NAMES[choice], drawn, negative) if is_applied else image
            for image, choice, drawn, negative, is_applied in zip(
                images, chosen, magnitudes, negated, applied, strict=True
            )
        ]
    return images


def apply(image: Tensor, name: str, magnitude: float, negative: bool) -> Tensor:
    """Apply the operation ``name`` at ``magnitude``, clipped to 0…10; ``negative`` negates signed ones."""
    operation, argument = OPERATIONS[name]
    strength = min(max(magnitude, 0.0), MAX_MAGNITUDE) / MAX_MAGNITUDE
    return operation(image, argument(strength, negative, image.shape[-2], image.shape[-1]))
