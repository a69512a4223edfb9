# ruff: noqa: N803, N806  (shape suffixes)
"""Random rectangles for RandomResizedCrop and RandomErasing.

Only parameters, as arithmetic over a whole batch. Both follow torchvision's transforms of these names (ten
tries, rounding half to even), with a log-uniform aspect ratio that is quantised: the table is computed once
with Python's ``math``, so no batch depends on a device's implementation of the logarithm.

Legend: B samples, T tries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hpc_train.datasets.random_numbers import Keys

_TRIES = 10
_ASPECT_BINS = 4096


@dataclass(frozen=True)
class Rectangles:
    """One rectangle per image, in pixels, each (B,) int64. ``is_valid`` is false if no try fitted."""

    tops: Tensor
    lefts: Tensor
    heights: Tensor
    widths: Tensor
    is_valid: Tensor


@cache
def _aspect_table(low: float, high: float) -> Tensor:
    """Return ratios that are evenly spaced in the logarithm, (bins,) float64."""
    start, span = math.log(low), math.log(high) - math.log(low)
    ratios = [math.exp(start + span * (k + 0.5) / _ASPECT_BINS) for k in range(_ASPECT_BINS)]
    return torch.tensor(ratios, dtype=torch.float64)


def _tries(
    keys: Keys, purpose: str, areas_B: Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the sides √(area * aspect) and √(area / aspect) of each try, rounded, (B, T) int64 each."""
    low, high = scale
    parts_BT = low + keys.uniform_many(f"{purpose}.area", _TRIES) * (high - low)
    bins_BT = (keys.uniform_many(f"{purpose}.aspect", _TRIES) * _ASPECT_BINS).to(torch.int64)
    aspects_BT = _aspect_table(*ratio).to(bins_BT.device)[bins_BT]
    targets_BT = areas_B.to(torch.float64)[:, None] * parts_BT
    long_BT = torch.sqrt(targets_BT * aspects_BT).round().to(torch.int64)
    short_BT = torch.sqrt(targets_BT / aspects_BT).round().to(torch.int64)
    return long_BT, short_BT


def _first_fit(fits_BT: Tensor, *sides_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return (B,) bool, True if any try fits, and each of ``sides_BT`` at the first try that fits, (B,)."""
    first_B1 = fits_BT.to(torch.int64).argmax(dim=1, keepdim=True)
    return fits_BT.any(dim=1), [side_BT.gather(1, first_B1)[:, 0] for side_BT in sides_BT]


def resized_crops(
    keys: Keys,
    image_heights_B: Tensor,
    image_widths_B: Tensor,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Rectangles:
    """Return the part of each image that RandomResizedCrop keeps; a centre crop if no try fits."""
    areas_B = image_heights_B * image_widths_B
    widths_BT, heights_BT = _tries(keys, "crop", areas_B, scale, ratio)
    fits_BT = (
        (widths_BT > 0)
        & (widths_BT <= image_widths_B[:, None])
        & (heights_BT > 0)
        & (heights_BT <= image_heights_B[:, None])
    )
    is_valid_B, (heights_B, widths_B) = _first_fit(fits_BT, heights_BT, widths_BT)
    centre_heights_B, centre_widths_B = _centre_sides(image_heights_B, image_widths_B, ratio)
    heights_B = torch.where(is_valid_B, heights_B, centre_heights_B)
    widths_B = torch.where(is_valid_B, widths_B, centre_widths_B)
    room_down_B, room_right_B = image_heights_B - heights_B, image_widths_B - widths_B
    tops_B = torch.where(is_valid_B, keys.integers("crop.top", 0, room_down_B + 1), room_down_B // 2)
    lefts_B = torch.where(is_valid_B, keys.integers("crop.left", 0, room_right_B + 1), room_right_B // 2)
    return Rectangles(tops_B, lefts_B, heights_B, widths_B, is_valid_B)


def _centre_sides(heights_B: Tensor, widths_B: Tensor, ratio: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the maximum sides whose aspect ratio is within ``ratio``."""
    least, greatest = ratio
    aspects_B = widths_B.to(torch.float64) / heights_B.to(torch.float64)
    too_tall_B, too_wide_B = aspects_B < least, aspects_B > greatest
    shorter_B = (widths_B.to(torch.float64) / least).round().to(torch.int64)
    narrower_B = (heights_B.to(torch.float64) * greatest).round().to(torch.int64)
    # Extreme ratios could round a side to zero, or past the image.
    shorter_B = torch.minimum(shorter_B.clamp(min=1), heights_B)
    narrower_B = torch.minimum(narrower_B.clamp(min=1), widths_B)
    return torch.where(too_tall_B, shorter_B, heights_B), torch.where(too_wide_B, narrower_B, widths_B)


#: Fraction of the area that is erased, and the rectangle's height / width: torchvision's defaults.
ERASED_SCALE = (0.02, 0.33)
ERASED_RATIO = (0.3, 3.3)


def erased_parts(keys: Keys, height: int, width: int, probability: float) -> Rectangles:
    """Return the part of each image of height * width that RandomErasing erases, if ``is_valid``."""
    chosen_B = keys.flags("erasing", probability)
    areas_B = torch.full_like(chosen_B, height * width, dtype=torch.int64)
    heights_BT, widths_BT = _tries(keys, "erasing", areas_B, ERASED_SCALE, ERASED_RATIO)
    fits_BT = (heights_BT < height) & (widths_BT < width)
    is_valid_B, (heights_B, widths_B) = _first_fit(fits_BT, heights_BT, widths_BT)
    heights_B, widths_B = heights_B * is_valid_B, widths_B * is_valid_B
    tops_B = keys.integers("erasing.top", 0, height - heights_B + 1)
    lefts_B = keys.integers("erasing.left", 0, width - widths_B + 1)
    return Rectangles(tops_B, lefts_B, heights_B, widths_B, is_valid_B & chosen_B)
