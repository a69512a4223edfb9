"""Keys of ``data`` that do not apply to images with masks or boxes, and keys that apply only to them.

Validation checks them by the facts of the task, ranks by the task's target.
"""

from __future__ import annotations

from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import DataConfig


def not_for_masks(data: DataConfig) -> Problem | None:
    """Return the problem if a key of ``data.augment`` moves pixels without their masks."""
    moving = ("crop_padding", "randaugment", "policy")
    key = next((key for key in moving if getattr(data.augment, key)), None)
    if key is None:
        return None
    return Problem(
        ("data", "augment", key),
        "moves the pixels of the image, but not those of masks and boxes",
        "write random_scale, hflip or vflip, which move both",
    )


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
