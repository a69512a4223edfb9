"""Rules on the channels and the pixels of images.

Validation applies them to the facts of a data set's row (``facts``), ranks to the facts of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import DataConfig
from hpc_train.registry import split_name


def keys_of_image_files(data: DataConfig) -> list[str]:
    """Return the keys of ``data`` that affect the decoding of image files and differ from their defaults."""
    keys = ("value_range", "exif_orientation", "max_image_pixels")
    return [key for key in keys if getattr(data, key) != DataConfig.model_fields[key].default]


def model_problem(model: str, channels: int) -> Problem | None:
    """Return the problem if the model called ``model`` does not support this number of channels."""
    provider, rest = split_name(model)
    if provider != "torchvision" or channels in (1, 3):
        return None
    return Problem(
        ("model", "name"),
        f"torchvision's models take 1 or 3 channels and the data have {channels}",
        f"use timm's (timm/{rest}), which take any number",
    )


def normalize_problem(key: str, values: Sequence[float], channels: int) -> Problem | None:
    """Return the problem if ``data.normalize.<key>`` does not have one value per channel."""
    if len(values) == channels:
        return None
    message = f"{list(values)} has {len(values)} values, but images have {channels} channels"
    return Problem(("data", "normalize", key), message, f"write {channels}")
