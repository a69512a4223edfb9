"""``data.args`` of the built-in image data sets: checked before a run is queued, and by the ranks.

The arguments of lists, text and token shards are in the modules that count their samples.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpc_train.config.fields import PositiveInt, Section


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

    num_classes: PositiveInt
    """Number of classes; pixels of masks are 0 to ``num_classes`` - 1 or ``ignore_index``."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] = 255
    """Value of pixels that are not trained on and not counted."""
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
