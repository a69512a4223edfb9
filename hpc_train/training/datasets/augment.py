# ruff: noqa: N803, N806  (shape suffixes)
"""Random augmentation of training images (``data.augment``).

Called by the readers of training data; for images with masks or boxes, by ``joint``. Crops, flips and erasing
are drawn from counter-based random numbers for a whole batch, and most are applied to all of it at once.
The transforms of torchvision and timm run one sample at a time (``transforms``). A sample's result does not
depend on its batch or process.

Random rectangles follow torchvision's RandomResizedCrop and RandomErasing (ten tries, rounding half to even),
with a log-uniform aspect ratio that is quantised: the table is computed once with Python's ``math``, so no
batch depends on a device's implementation of the logarithm.

Legend: B samples, C channels, H rows, W columns, p pixels of padding, T tries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig, RandomResizedCropConfig
from hpc_train.training.datasets.decoding import EncodedImage, decoded
from hpc_train.training.datasets.images import centre_square, resize, stack
from hpc_train.training.datasets.random_numbers import Keys
from hpc_train.training.datasets.transforms import photometric_transforms, seeded

_TRIES = 10
_ASPECT_BINS = 4096
#: Fraction of the area that is erased, and the rectangle's height / width: torchvision's defaults.
_ERASED_SCALE = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)


class Augmentation:
    """``data.augment`` as a callable: resizing or random crop, padded crop, flips, then ``Photometric``."""

    def __init__(
        self, config: AugmentConfig, image_size: int | None, seed: int, interpolation: str = "bilinear"
    ) -> None:
        self._config = config
        self._image_size = image_size
        self._seed = seed
        self._interpolation = interpolation
        self._photometric = Photometric(config)

    def __call__(
        self,
        images: Tensor | Sequence[Tensor | EncodedImage],
        epoch: int,
        samples_B: Tensor,
        repeat: int | Tensor = 0,
    ) -> Tensor:
        """Return (B, C, H, W) of the input's dtype, from (B, C, H, W) or B images (C, H, W).

        ``samples_B`` (B,) int64 are the indices in the data set, ``repeat`` is the argument of ``Keys``. Does
        not modify its input.
        """
        keys = Keys(self._seed, epoch, samples_B, repeat)
        config = self._config
        sized = self._sized(images, keys)
        if config.crop_padding:
            sized = padded_crop(_batch(sized), keys, config.crop_padding)
        for name, probability, dim in (("hflip", config.hflip, -1), ("vflip", config.vflip, -2)):
            if probability:
                sized = _flip(sized, keys.flags(name, probability), dim)
        return self._photometric(_batch(sized), keys)

    def _sized(
        self, images: Tensor | Sequence[Tensor | EncodedImage], keys: Keys
    ) -> Tensor | Sequence[Tensor]:
        size, crop = self._image_size, self._config.random_resized_crop
        if crop is not None:
            return _resized_crops(images, keys, crop, size, self._interpolation)
        if size is not None and not _are_square(images, size):
            return [centre_square(decoded(image), size, 1.0, self._interpolation) for image in images]
        return images if isinstance(images, Tensor) else [decoded(image) for image in images]


class Photometric:
    """Color jitter, RandAugment or a policy, and erasing, in this order."""

    def __init__(self, config: AugmentConfig) -> None:
        names = ("color_jitter", "randaugment", "policy")
        self._key = next((name for name in names if getattr(config, name) is not None), "")
        self._transforms = photometric_transforms(config)
        self._erasing = config.erasing

    def __call__(self, images_BCHW: Tensor, keys: Keys) -> Tensor:
        """Return the images (B, C, H, W)."""
        if self._transforms:
            self._refuse_others(images_BCHW)
            images_BCHW = torch.stack(seeded(self._transformed, images_BCHW, keys, "photometric"))
        return erase(images_BCHW, keys, self._erasing) if self._erasing else images_BCHW

    def _transformed(self, image: Tensor) -> Tensor:
        for transform in self._transforms:
            image = transform(image)
        return image

    def _refuse_others(self, images_BCHW: Tensor) -> None:
        channels = images_BCHW.shape[1]
        if images_BCHW.dtype != torch.uint8 or channels not in (1, 3):
            raise BadFileError(
                f"data.augment.{self._key}: images are {images_BCHW.dtype} of {channels} channels; it works "
                "on uint8 images of 1 or 3 channels; take it out"
            )


def _batch(images: Tensor | Sequence[Tensor]) -> Tensor:
    return images if isinstance(images, Tensor) else stack(images)


def _are_square(images: Tensor | Sequence[Tensor | EncodedImage], size: int) -> bool:
    distinct = images[:1] if isinstance(images, Tensor) else images
    return all(image.shape[-2:] == (size, size) for image in distinct)


def _resized_crops(
    images: Tensor | Sequence[Tensor | EncodedImage],
    keys: Keys,
    config: RandomResizedCropConfig,
    size: int | None,
    interpolation: str,
) -> list[Tensor]:
    heights_B = torch.tensor([image.shape[-2] for image in images])
    widths_B = torch.tensor([image.shape[-1] for image in images])
    crops = resized_crops(keys, heights_B, widths_B, config.scale, config.ratio)
    corners = torch.stack([crops.tops, crops.lefts, crops.heights, crops.widths], dim=1)
    return [
        _resized_part(image, crop, (size or image.shape[-2], size or image.shape[-1]), filtering)
        for image, crop, filtering in zip(
            images,
            corners.tolist(),
            crop_interpolations(keys, config, interpolation, len(images)),
            strict=True,
        )
    ]


def crop_interpolations(
    keys: Keys, config: RandomResizedCropConfig | None, default: str, count: int
) -> list[str]:
    """Return the interpolation of each image."""
    if config is None or config.interpolation != "random":
        return [(config and config.interpolation) or default] * count
    is_bicubic = keys.flags("crop.interpolation", 0.5).tolist()
    return ["bicubic" if flag else "bilinear" for flag in is_bicubic]


def _resized_part(
    image: Tensor | EncodedImage, crop: Sequence[int], to: tuple[int, int], interpolation: str
) -> Tensor:
    top, left, height, width = crop
    if isinstance(image, EncodedImage):
        return image.resized_part((top, left), (height, width), to, interpolation)
    return resize(image[:, top : top + height, left : left + width], *to, interpolation)


def padded_crop(images_BCHW: Tensor, keys: Keys, padding: int) -> Tensor:
    """Pad with zeros on all sides and crop the original size at a random position."""
    height, width = images_BCHW.shape[-2:]
    tops_B = keys.integers("crop_padding.top", 0, 2 * padding + 1)
    lefts_B = keys.integers("crop_padding.left", 0, 2 * padding + 1)
    padded = functional.pad(images_BCHW, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (B, C, 2p + 1, 2p + 1, H, W)
    rows_B = torch.arange(len(images_BCHW), device=images_BCHW.device)
    return windows[rows_B, :, tops_B, lefts_B]


def _flip(images: Tensor | Sequence[Tensor], chosen_B: Tensor, dim: int) -> Tensor | Sequence[Tensor]:
    """Return the images with the chosen ones flipped; images in a list are flipped one by one, in cache."""
    if not isinstance(images, Tensor):
        # Keep the memory layout: copying another one into the batch takes twenty times as long (measured).
        return [
            image.flip(dim) if is_chosen else image
            for image, is_chosen in zip(images, chosen_B.tolist(), strict=True)
        ]
    # torch.where takes several times as long for bytes (measured).
    rows = chosen_B.nonzero()[:, 0]
    return images.index_copy(0, rows, images.index_select(0, rows).flip(dim))


def erase(images_BCHW: Tensor, keys: Keys, probability: float) -> Tensor:
    """Set a random rectangle of each selected image to zero."""
    height, width = images_BCHW.shape[-2:]
    parts = erased_parts(keys, height, width, probability)
    rows_H = torch.arange(height, device=images_BCHW.device)
    columns_W = torch.arange(width, device=images_BCHW.device)
    in_rows_BH = (rows_H >= parts.tops[:, None]) & (rows_H < (parts.tops + parts.heights)[:, None])
    in_columns_BW = (columns_W >= parts.lefts[:, None]) & (columns_W < (parts.lefts + parts.widths)[:, None])
    erased_BHW = (in_rows_BH & parts.is_valid[:, None])[:, :, None] & in_columns_BW[:, None, :]
    return images_BCHW.masked_fill(erased_BHW[:, None], 0)


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


def erased_parts(keys: Keys, height: int, width: int, probability: float) -> Rectangles:
    """Return the part of each image of height * width that RandomErasing erases, if ``is_valid``."""
    chosen_B = keys.flags("erasing", probability)
    areas_B = torch.full_like(chosen_B, height * width, dtype=torch.int64)
    heights_BT, widths_BT = _tries(keys, "erasing", areas_B, _ERASED_SCALE, _ERASED_RATIO)
    fits_BT = (heights_BT < height) & (widths_BT < width)
    is_valid_B, (heights_B, widths_B) = _first_fit(fits_BT, heights_BT, widths_BT)
    heights_B, widths_B = heights_B * is_valid_B, widths_B * is_valid_B
    tops_B = keys.integers("erasing.top", 0, height - heights_B + 1)
    lefts_B = keys.integers("erasing.left", 0, width - widths_B + 1)
    return Rectangles(tops_B, lefts_B, heights_B, widths_B, is_valid_B & chosen_B)
