# ruff: noqa: N806  (shape suffixes)
"""``data.augment`` and ``data.image_size`` for images with masks or boxes.

A ``Geometry`` is one map from an image to the model's canvas, drawn from the sample's random numbers; it is
applied to the image (bilinear or bicubic with antialiasing), the mask (nearest neighbour) and the boxes.
``JointTransform`` applies it to whole batches, for the readers. Only targets whose ``TargetSpec`` has a
``geometry`` are moved.

Legend: B samples, C channels, H rows and W columns of the canvas, h and w rows and columns of an image,
n boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig, DataConfig
from hpc_train.experiment.data_facts.image_facts import not_for_masks
from hpc_train.training.datasets.augment import Photometric, crop_interpolations, resized_crops
from hpc_train.training.datasets.decoding import EncodedImage, reduction_for
from hpc_train.training.datasets.images import resize, stack
from hpc_train.training.datasets.random_numbers import Keys
from hpc_train.training.datasets.sampler import Slot
from hpc_train.training.datasets.targets import parts_moved_as
from hpc_train.training.datasets.types import TargetSpec, TargetSpecs, Tensors

Sides = tuple[int, int]


@dataclass(frozen=True)
class Rectangle:
    """Rows ``top`` to ``top + height`` and columns ``left`` to ``left + width``, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def sides(self) -> Sides:
        """Return (height, width)."""
        return self.height, self.width

    def of(self, image: Tensor) -> Tensor:
        """Return this part of (…, h, w)."""
        return image[..., self.top : self.top + self.height, self.left : self.left + self.width]

    def divided(self, divisor: int) -> Rectangle:
        """Return the rectangle with all numbers divided, rounded down."""
        return Rectangle(
            self.top // divisor, self.left // divisor, self.height // divisor, self.width // divisor
        )

    def times(self, factor: int) -> Rectangle:
        """Return the rectangle with all numbers multiplied."""
        return Rectangle(self.top * factor, self.left * factor, self.height * factor, self.width * factor)


@dataclass(frozen=True)
class Geometry:
    """Resizes the ``part`` of an image to ``placed`` on the canvas, and then flips the canvas.

    Pixels of the canvas outside of ``placed`` are padding.
    """

    part: Rectangle
    placed: Rectangle
    #: (H, W).
    canvas: Sides
    hflip: bool = False
    vflip: bool = False
    #: A JPEG file is decoded to this fraction of its sides; ``part`` is a multiple of it.
    reduction: int = 1

    def image(self, image: Tensor | EncodedImage, interpolation: str = "bilinear") -> Tensor:
        """Return (C, H, W) of the image's dtype; padding is 0. Raises UndecodableError."""
        if isinstance(image, EncodedImage):
            part = self.part.divided(self.reduction).of(image.decode(self.reduction))
        else:
            part = self.part.of(image)
        return self._flipped(self._on_canvas(resize(part, *self.placed.sides, interpolation), 0))

    def mask(self, mask: Tensor, padding: int) -> Tensor:
        """Return (H, W) of the mask's dtype, from (h, w), by nearest neighbour."""
        rows = _nearest(self.part.top, self.part.height, self.placed.height)
        columns = _nearest(self.part.left, self.part.width, self.placed.width)
        return self._flipped(self._on_canvas(mask[rows][:, columns], padding))

    def boxes(self, boxes: Tensor, minimum_side: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the boxes (n, 4) moved and clipped, and (n,) bool: True if a box is still large enough.

        Left, top, right, bottom in pixels, floating point. Both sides of a box must have ``minimum_side``
        pixels on the canvas; a box outside of the part has none.
        """
        left, top, right, bottom = boxes.unbind(1)
        columns = [self._moved(edges, "left", "width") for edges in (left, right)]
        rows = [self._moved(edges, "top", "height") for edges in (top, bottom)]
        if self.hflip:
            columns = [self.canvas[1] - edges for edges in reversed(columns)]
        if self.vflip:
            rows = [self.canvas[0] - edges for edges in reversed(rows)]
        moved = torch.stack([columns[0], rows[0], columns[1], rows[1]], dim=1)
        sides = moved[:, 2:] - moved[:, :2]
        return moved, ((sides >= minimum_side) & (sides > 0)).all(dim=1)

    def _moved(self, edges: Tensor, start: str, length: str) -> Tensor:
        scale = getattr(self.placed, length) / getattr(self.part, length)
        low, room = getattr(self.placed, start), getattr(self.placed, length)
        return ((edges - getattr(self.part, start)) * scale + low).clamp(low, low + room)

    def _on_canvas(self, placed: Tensor, padding: int) -> Tensor:
        if self.placed.sides == self.canvas:
            return placed
        *channels, _, _ = placed.shape
        # Images are stored as (H, W, C).
        canvas = placed.new_full((*self.canvas, *channels), padding)
        canvas = canvas.permute(2, 0, 1) if channels else canvas
        self.placed.of(canvas).copy_(placed)
        return canvas

    def _flipped(self, canvas: Tensor) -> Tensor:
        dims = [dim for dim, is_flipped in ((-1, self.hflip), (-2, self.vflip)) if is_flipped]
        return canvas.flip(dims) if dims else canvas


def _nearest(start: int, length: int, to: int) -> Tensor:
    """Return the pixels of ``start`` to ``start + length`` nearest to ``to`` evenly spaced centers."""
    return start + (2 * torch.arange(to) + 1) * length // (2 * to)


def fitted(image: Sides, canvas: Sides | None) -> Geometry:
    """Return the map of the evaluation: the whole image, scaled to fit the canvas, at its top left.

    Without ``canvas`` the image is unchanged.
    """
    canvas = canvas or image
    return Geometry(Rectangle(0, 0, *image), Rectangle(0, 0, *scaled_sides(image, canvas)), canvas)


def fitted_back(image: Sides, canvas: Sides | None) -> Geometry:
    """Return the inverse of ``fitted``, which moves boxes from the canvas to the image."""
    there = fitted(image, canvas)
    return Geometry(there.placed, there.part, image)


def scaled_sides(image: Sides, canvas: Sides, factor: float = 1.0) -> Sides:
    """Return the sides of an image scaled to fit the canvas, times ``factor``, rounded."""
    fit = min(canvas[0] / image[0], canvas[1] / image[1]) * factor
    return max(1, round(image[0] * fit)), max(1, round(image[1] * fit))


def random_geometries(
    config: AugmentConfig,
    keys: Keys,
    images: Sequence[Sides],
    canvas: Sides | None,
    eval_canvas: Sides | None,
) -> list[Geometry]:
    """Return a map for each of B images, for ``random_resized_crop``, ``random_scale``, ``hflip``, ``vflip``.

    ``canvas``: (H, W), by default the image's own; ``eval_canvas``: the canvas of the evaluation, to which
    ``random_scale`` is relative.
    """
    placed = _cropped(config, keys, images, canvas) or _scaled(config, keys, images, canvas, eval_canvas)
    flips = zip(
        keys.flags("hflip", config.hflip).tolist(), keys.flags("vflip", config.vflip).tolist(), strict=True
    )
    return [
        _aligned(part, at, size, hflip, vflip)
        for (part, at, size), (hflip, vflip) in zip(placed, flips, strict=True)
    ]


_Placed = tuple[Rectangle, Rectangle, Sides]


def _cropped(
    config: AugmentConfig, keys: Keys, images: Sequence[Sides], canvas: Sides | None
) -> list[_Placed]:
    crop = config.random_resized_crop
    if crop is None:
        return []
    heights_B, widths_B = torch.tensor(images).unbind(1)
    parts = resized_crops(keys, heights_B, widths_B, crop.scale, crop.ratio)
    corners = torch.stack([parts.tops, parts.lefts, parts.heights, parts.widths], dim=1).tolist()
    sizes = [canvas or image for image in images]
    return [
        (Rectangle(*corner), Rectangle(0, 0, *size), size)
        for corner, size in zip(corners, sizes, strict=True)
    ]


def _scaled(
    config: AugmentConfig,
    keys: Keys,
    images: Sequence[Sides],
    canvas: Sides | None,
    eval_canvas: Sides | None,
) -> list[_Placed]:
    low, high = config.random_scale or (1.0, 1.0)
    factors = (low + keys.uniform("scale") * (high - low)).tolist()
    downs = keys.uniform("scale.top").tolist()
    rights = keys.uniform("scale.left").tolist()
    pads = config.random_scale is not None
    placed: list[_Placed] = []
    for image, factor, down, right in zip(images, factors, downs, rights, strict=True):
        size = canvas or image
        scaled = scaled_sides(image, eval_canvas or size, factor)
        top, height, row, rows = _along(image[0], scaled[0], size[0], down, pads)
        left, width, column, columns = _along(image[1], scaled[1], size[1], right, pads)
        placed.append((Rectangle(top, left, height, width), Rectangle(row, column, rows, columns), size))
    return placed


def _along(length: int, scaled: int, canvas: int, fraction: float, pads: bool) -> tuple[int, int, int, int]:
    """Return start and length of the part of an axis, and start and length on the canvas.

    ``fraction`` in [0, 1) selects one of the possible starts of the crop or, with ``pads``, of the placement.
    """
    if scaled > canvas:
        cropped = min(length, max(1, round(length * canvas / scaled)))
        return int(fraction * (length - cropped + 1)), cropped, 0, canvas
    return 0, length, int(fraction * (canvas - scaled + 1)) if pads else 0, scaled


def _aligned(part: Rectangle, placed: Rectangle, canvas: Sides, hflip: bool, vflip: bool) -> Geometry:
    """Return the map, its part rounded to the pixels of an image decoded at a fraction of its size.

    Rounded for images of any format and for masks alike, so that they match.
    """
    reduction = reduction_for(part.sides, placed.sides)
    part = part.divided(reduction).times(reduction)
    return Geometry(part, placed, canvas, hflip, vflip, reduction)


#: Boxes with a side of fewer pixels on the canvas are not trained on (assumed).
MINIMUM_SIDE = 1.0


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
        self._photometric = Photometric(self._augment)
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
        crop = self._augment.random_resized_crop
        names = crop_interpolations(keys, crop, self._interpolation, len(images))
        images_BCHW = stack(
            [
                geometry.image(image, name)
                for geometry, image, name in zip(geometries, images, names, strict=True)
            ]
        )
        return self._photometric(images_BCHW, keys), moved

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
            minimum = MINIMUM_SIDE if self._is_training else 0.0
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
