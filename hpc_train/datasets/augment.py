# ruff: noqa: N803, N806  (shape suffixes)
"""Random augmentation of training images, computed from counter-based random numbers per sample.

Called by the readers of training data; for images with masks or boxes, by ``joint``. Parameters are computed
for a whole batch, and some operations (flips, crops of padded images, erasing) are applied to all of it. A
sample's result does not depend on its batch or process.

Legend: B samples, C channels, H rows, W columns, p pixels of padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.config.training_sections import (
    AugmentConfig,
    ColorJitterConfig,
    RandAugmentConfig,
    RandomResizedCropConfig,
)
from hpc_train.datasets.decoding import EncodedImage, decoded
from hpc_train.datasets.images import centre_square, resize, stack
from hpc_train.datasets.random_numbers import Keys
from hpc_train.datasets.rectangles import erased_parts, resized_crops
from hpc_train.errors import BadFileError


class Augmentation:
    """``data.augment`` as a callable: resizing or random crop, padded crop, flips, then ``photometric``."""

    def __init__(
        self, config: AugmentConfig, image_size: int | None, seed: int, interpolation: str = "bilinear"
    ) -> None:
        self._config = config
        self._image_size = image_size
        self._seed = seed
        self._interpolation = interpolation

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
        return photometric(_batch(self._flipped(sized, keys)), keys, config)

    def _sized(
        self, images: Tensor | Sequence[Tensor | EncodedImage], keys: Keys
    ) -> Tensor | Sequence[Tensor]:
        size, crop = self._image_size, self._config.random_resized_crop
        if crop is not None:
            return _resized_crops(images, keys, crop, size, self._interpolation)
        if size is not None and not _are_square(images, size):
            return [centre_square(decoded(image), size, 1.0, self._interpolation) for image in images]
        return images if isinstance(images, Tensor) else [decoded(image) for image in images]

    def _flipped(self, images: Tensor | Sequence[Tensor], keys: Keys) -> Tensor | Sequence[Tensor]:
        for name, probability, dim in (("hflip", self._config.hflip, -1), ("vflip", self._config.vflip, -2)):
            if probability:
                images = _flip(images, keys.flags(name, probability), dim)
        return images


def photometric(images_BCHW: Tensor, keys: Keys, config: AugmentConfig) -> Tensor:
    """Return the images (B, C, H, W) with color jitter, RandAugment, policy and erasing, in this order."""
    if config.color_jitter is not None:
        images_BCHW = _color_jitter(images_BCHW, keys, config.color_jitter)
    if config.randaugment is not None:
        images_BCHW = _randaugment(images_BCHW, keys, config.randaugment)
    if config.policy is not None:
        images_BCHW = _apply_policy(images_BCHW, keys, config.policy)
    if config.erasing:
        images_BCHW = erase(images_BCHW, keys, config.erasing)
    return images_BCHW


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


def crop_interpolations(keys: Keys, config: RandomResizedCropConfig, default: str, count: int) -> list[str]:
    """Return the interpolation of each image's crop."""
    if config.interpolation != "random":
        return [config.interpolation or default] * count
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


def _randaugment(images_BCHW: Tensor, keys: Keys, config: RandAugmentConfig) -> Tensor:
    _refuse_others(images_BCHW, "randaugment")
    images, values = list(images_BCHW), (config.num_ops, config.magnitude, config.magnitude_std)
    if config.operations == "timm":
        from hpc_train.datasets.timm_randaugment import PROBABILITY, timm_randaugment

        probability = PROBABILITY if config.probability is None else config.probability
        return torch.stack(timm_randaugment(images, keys, *values, probability))
    from hpc_train.datasets.randaugment import randaugment  # and torchvision with it

    probability = 1.0 if config.probability is None else config.probability
    return torch.stack(randaugment(images, keys, *values, probability))


def _apply_policy(images_BCHW: Tensor, keys: Keys, policy: str) -> Tensor:
    _refuse_others(images_BCHW, "policy")
    from hpc_train.datasets.augment_policies import augmented  # and torchvision with it

    return torch.stack(augmented(list(images_BCHW), keys, policy))


def _refuse_others(images_BCHW: Tensor, key: str) -> None:
    channels = images_BCHW.shape[1]
    if images_BCHW.dtype != torch.uint8 or channels not in (1, 3):
        raise BadFileError(
            f"data.augment.{key}: images are {images_BCHW.dtype} of {channels} channels; it works on "
            "uint8 images of 1 or 3 channels; take it out"
        )


def _color_jitter(images_BCHW: Tensor, keys: Keys, config: ColorJitterConfig) -> Tensor:
    _refuse_others(images_BCHW, "color_jitter")
    from hpc_train.datasets.color_jitter import color_jitter  # and torchvision with it

    return color_jitter(images_BCHW, keys, config)


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
