# ruff: noqa: N806  (shape suffixes)
"""``data.augment`` and ``data.image_size`` for images with masks or boxes. Called by the readers of batches.

Only targets whose ``TargetSpec`` has a ``geometry`` are moved.

Legend: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.training_sections import AugmentConfig, DataConfig
from hpc_train.data_facts.image_facts import not_for_masks
from hpc_train.datasets.augment import crop_interpolations, photometric
from hpc_train.datasets.decoding import EncodedImage
from hpc_train.datasets.geometry import Geometry, fitted, random_geometries
from hpc_train.datasets.images import stack
from hpc_train.datasets.random_numbers import Keys
from hpc_train.datasets.sampler import Slot
from hpc_train.datasets.structures import Tensors
from hpc_train.datasets.targets import parts_moved_as
from hpc_train.datasets.types import TargetSpec, TargetSpecs
from hpc_train.errors import BadFileError

#: Boxes whose sides are shorter than this many pixels after a random crop are dropped (assumed).
_MINIMUM_SIDE = 1.0


def moves_targets(spec: TargetSpecs) -> bool:
    """Return True if the task has targets that move with the image."""
    specs = spec.values() if isinstance(spec, dict) else [spec]
    return any(item is not None and item.geometry is not None for item in specs)


class JointTransform:
    """Resizes or augments images and the targets that move with them; without ``spec`` only images.

    Raises BadFileError if ``data.augment`` moves pixels in a way that masks and boxes can't follow.
    """

    def __init__(self, data: DataConfig, seed: int, spec: TargetSpecs, *, is_training: bool) -> None:
        if problem := not_for_masks(data):
            raise problem.as_error()
        self._spec = spec
        self._seed = seed
        self._interpolation = data.interpolation
        self._augment = data.augment if is_training else AugmentConfig()
        self._is_training = is_training
        self._canvas, self._eval_canvas = data.height_and_width, data.eval_height_and_width

    def __call__(
        self, inputs: Tensor | Sequence[Tensor | EncodedImage], targets: Tensors, slot: Slot
    ) -> tuple[Tensor, Tensors]:
        """Return (B, C, H, W) and the targets: masks (B, H, W); boxes and their data as lists of B tensors.

        ``targets`` come from ``TargetCheck``, masks (B, H, W) or a list of B. Raises UndecodableError.
        """
        images = list(inputs)
        self._refuse_other_sides(images, targets, slot)
        keys = Keys(self._seed, slot.epoch, slot.indices, slot.repeats)
        geometries = self._geometries(images, keys)
        moved = self._moved(targets, geometries)
        names = self._interpolations(keys, len(images))
        images_BCHW = stack(
            [
                geometry.image(image, name)
                for geometry, image, name in zip(geometries, images, names, strict=True)
            ]
        )
        return photometric(images_BCHW, keys, self._augment), moved

    def _interpolations(self, keys: Keys, count: int) -> list[str]:
        crop = self._augment.random_resized_crop
        default = self._interpolation
        return [default] * count if crop is None else crop_interpolations(keys, crop, default, count)

    def _geometries(self, images: Sequence[Tensor | EncodedImage], keys: Keys) -> list[Geometry]:
        sides = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        if not self._is_training:
            return [fitted(size, self._eval_canvas) for size in sides]
        return random_geometries(self._augment, keys, sides, self._canvas, self._eval_canvas)

    def _moved(self, targets: Tensors, geometries: Sequence[Geometry]) -> Tensors:
        specs = self._spec if isinstance(self._spec, dict) else {"": self._spec}
        parts = targets if isinstance(self._spec, dict) else {"": targets}
        moved: dict[str, Any] = dict(parts)
        flags: list[Tensor] | None = None
        for name, boxes in parts_moved_as("boxes", self._spec, targets):
            minimum = _MINIMUM_SIDE if self._is_training else 0.0
            pairs = [
                geometry.boxes(values, minimum) for geometry, values in zip(geometries, boxes, strict=True)
            ]
            flags = [fits if self._is_training else torch.ones_like(fits) for _, fits in pairs]
            moved[name] = [values[fits] for (values, _), fits in zip(pairs, flags, strict=True)]
        for name, rows in parts_moved_as("per box", self._spec, targets):
            if flags is not None:
                moved[name] = [values[fits] for values, fits in zip(rows, flags, strict=True)]
        for name, masks in parts_moved_as("mask", self._spec, targets):
            moved[name] = _moved_masks(masks, geometries, specs[name])
        return moved if isinstance(self._spec, dict) else moved[""]

    def _refuse_other_sides(self, images: Sequence[Any], targets: Tensors, slot: Slot) -> None:
        """Raise BadFileError if a mask of an ``ArraySplit`` does not fit its image."""
        for _, masks in parts_moved_as("mask", self._spec, targets):
            for index, image, mask in zip(slot.indices.tolist(), images, masks, strict=True):
                if tuple(mask.shape[-2:]) != tuple(image.shape[-2:]):
                    raise BadFileError(
                        f"data: sample {index} has a mask of {tuple(mask.shape)} for an image of "
                        f"{tuple(image.shape)}; make both the same size"
                    )


def _moved_masks(masks: Sequence[Tensor], geometries: Sequence[Geometry], spec: TargetSpec | None) -> Tensor:
    padding = 0 if spec is None or spec.ignored is None else spec.ignored
    moved = [geometry.mask(mask, padding) for geometry, mask in zip(geometries, masks, strict=True)]
    if len({mask.dtype for mask in moved}) > 1:  # 8 and 16 bits: one batch, one dtype
        moved = [mask.to(torch.int64) for mask in moved]
    return torch.stack(moved)
