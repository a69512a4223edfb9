"""Images: ``data.args`` of the built-in data sets, and rules that validation and the ranks apply alike.

The arguments of lists, text and token shards are in the modules that count their samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from hpc_train.experiment.config.fields import PositiveInt, Section
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.registry import is_factory, split_name

#: PIL modes of masks, with one number per pixel: bits, bytes, indices of a palette, 16 and 32 bits.
MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
#: Rawmode of gray PNG files of two and four bits → the factor by which Pillow scales the stored values.
SCALED_MASKS = {"L;2": 85, "L;4": 17}


class DigitsArgs(Section):
    """``data.args`` of digits."""

    channels: Literal[1, 3] = 1
    """3 repeats the gray channel."""


class SyntheticArgs(Section):
    """``data.args`` of synthetic."""

    num_samples: PositiveInt = 1024
    """Number of training images."""
    image_size: PositiveInt = 32
    """Height and width in pixels."""
    channels: PositiveInt = 3
    """Number of channels."""
    num_classes: PositiveInt = 10
    """Number of classes; sample i is of class i modulo this number."""


class ImageFolderArgs(Section):
    """``data.args`` of imagefolder."""

    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""


class SegmentationFolderArgs(Section):
    """``data.args`` of segmentation_folder."""

    num_classes: Annotated[PositiveInt, Field(le=255)]
    """Number of classes; pixels of masks are 0 to ``num_classes`` - 1 or ``ignore_index``."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] = 255
    """Value of pixels that are not trained on and not counted. With ``mask_values`` it may be any value that
    is not one of them, such as 0."""
    class_names: list[str] = []
    """Names of the classes, for the names of metrics. Default: their numbers."""
    mask_values: list[Annotated[int, Field(ge=0, le=65535)]] = []
    """Pixel value of each class in the masks, in the order of class numbers, such as ``[0, 255]``; other
    values are an error, except ``ignore_index``. Default: pixels are class numbers."""
    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""


class CocoArgs(Section):
    """``data.args`` of coco."""

    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""
    bad_boxes: Literal["fail", "drop"] = "fail"
    """What to do with boxes without area, or outside of their image: end with an error, or drop them."""
    roots: list[str] = []
    """Other folders below which a file may name images, by absolute paths. Default: ``root`` only."""


def not_for_masks(data: DataConfig) -> Problem | None:
    """Return the problem if a key of ``data.augment`` moves pixels without their masks."""
    moving = ("crop_padding", "randaugment", "policy")
    key = next((key for key in moving if getattr(data.augment, key)), None)
    if key is None:
        return None
    message = "moves the pixels of the image, but not those of masks and boxes"
    return Problem(("data", "augment", key), message, "write random_scale, hflip or vflip, which move both")


def only_for_masks(data: DataConfig) -> Problem | None:
    """Return the problem if a key is set that only images with masks or boxes have."""
    for path, is_given in (
        (("data", "augment", "random_scale"), data.augment.random_scale is not None),
        (("data", "eval_size"), data.eval_size is not None),
    ):
        if is_given:
            return Problem(path, "is for images with masks or boxes", "take it out")
    if isinstance(data.image_size, tuple):
        height, width = data.image_size
        message = f"{height}x{width} is for images with masks or boxes, others are resized to squares"
        return Problem(("data", "image_size"), message, f"write {height}")
    return None


#: The keys of ``data`` that affect the decoding of image files.
KEYS_OF_IMAGE_FILES = ("value_range", "exif_orientation", "max_image_pixels")


def changed_keys(data: DataConfig, keys: Iterable[str] = KEYS_OF_IMAGE_FILES) -> list[str]:
    """Return the ``keys`` of ``data`` that differ from their defaults."""
    return [key for key in keys if getattr(data, key) != DataConfig.model_fields[key].default]


def model_problem(model: str, channels: int) -> Problem | None:
    """Return the problem if the model called ``model`` does not support this number of channels."""
    provider, rest = split_name(model)
    if provider != "torchvision" or channels in (1, 3):
        return None
    message = f"torchvision's models take 1 or 3 channels and the data have {channels}"
    return Problem(("model", "name"), message, f"use timm's (timm/{rest}), which take any number")


def normalize_problem(key: str, values: Sequence[float], channels: int) -> Problem | None:
    """Return the problem if ``data.normalize.<key>`` does not have one value per channel."""
    if len(values) == channels:
        return None
    message = f"{list(values)} has {len(values)} values, but images have {channels} channels"
    return Problem(("data", "normalize", key), message, f"write {channels}")


#: Prefixes of their names; torchvision's other detectors also need masks or keypoints.
_DETECTORS = ("fasterrcnn_", "retinanet_", "fcos_", "ssd300_", "ssdlite320_")


def is_detector(model: str) -> bool:
    """Return True if ``model.name`` is one of torchvision's detectors."""
    provider, rest = ("", "") if is_factory(model) else split_name(model)
    return provider == "torchvision" and rest.startswith(_DETECTORS)
