# ruff: noqa: N802, N803, N806  (shape suffixes)
"""Random brightness, contrast, saturation and hue (``data.augment.color_jitter``).

The operations are torchvision's, with factors and an order drawn from the sample's random numbers, as in
``torchvision.transforms.v2.ColorJitter``. Legend: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

from hpc_train.config.training_sections import ColorJitterConfig
from hpc_train.datasets.random_numbers import Keys

_ADJUST = {
    "brightness": tvf.adjust_brightness,
    "contrast": tvf.adjust_contrast,
    "saturation": tvf.adjust_saturation,
    "hue": tvf.adjust_hue,
}
#: Operations that do not apply to gray images.
_COLOR_ONLY = ("saturation", "hue")


def color_jitter(images_BCHW: Tensor, keys: Keys, config: ColorJitterConfig) -> Tensor:
    """Return the images (B, C, H, W) uint8, C 1 or 3, each with separate factors and a separate order."""
    names = [name for name in _ADJUST if getattr(config, name)]
    if images_BCHW.shape[1] == 1:
        names = [name for name in names if name not in _COLOR_ONLY]
    if not names:
        return images_BCHW
    factors_KB = [_factors_B(name, keys, getattr(config, name)).tolist() for name in names]
    orders_BK = keys.uniform_many("color_jitter.order", len(names)).argsort(dim=1).tolist()
    return torch.stack(
        [
            _adjusted(image, [(names[k], factors_KB[k][place]) for k in order])
            for place, (image, order) in enumerate(zip(images_BCHW, orders_BK, strict=True))
        ]
    )


def _factors_B(name: str, keys: Keys, most: float) -> Tensor:
    centre = 0.0 if name == "hue" else 1.0
    return centre + (2 * keys.uniform(f"color_jitter.{name}") - 1) * most


def _adjusted(image: Tensor, changes: list[tuple[str, float]]) -> Tensor:
    for name, factor in changes:
        image = _ADJUST[name](image, factor)
    return image
