"""``torchvision/Cityscapes`` and ``torchvision/VOCSegmentation``: a class number per pixel.

torchvision finds the files; they are read like those of ``segmentation_folder``. Called by ``torchvision``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import Cityscapes

from hpc_train.datasets.base import DataSource
from hpc_train.datasets.images import PixelRules, image_content
from hpc_train.datasets.sources.infer import mean_and_std
from hpc_train.datasets.sources.segmentation_folder import read_mask
from hpc_train.datasets.types import DataInfo

_IGNORED = 255
_VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip


@dataclass(frozen=True)
class MaskedSet:
    """The names that a class of torchvision has for its splits and files."""

    #: The argument that selects ``train`` or ``val``.
    split_argument: str
    class_names: tuple[str, ...]
    #: torchvision's split → the masks' files, in the order of ``images``.
    masks: Callable[[Any], Iterable[str]]
    #: Arguments that the user can't set.
    fixed: dict[str, Any] = field(default_factory=dict)
    #: Number in a mask → class, (256,) uint8; None: they are the same.
    classes: Tensor | None = None

    def source(self, train: Any, val: Any, rules: PixelRules) -> DataSource:
        """Return the data of torchvision's two splits."""
        mean, std = mean_and_std(MaskedFiles.channels)
        info = DataInfo(
            len(self.class_names),
            MaskedFiles.channels,
            mean,
            std,
            self.class_names,
            ignore_index=_IGNORED,
        )
        return DataSource(self._files(train, rules), self._files(val, rules), info)

    def _files(self, split: Any, rules: PixelRules) -> MaskedFiles:
        return MaskedFiles(split.images, self.masks(split), self.classes, rules)


class MaskedFiles:
    """Image files and their masks."""

    channels = 3

    def __init__(
        self, images: Iterable[str], masks: Iterable[str], classes: Tensor | None, rules: PixelRules
    ) -> None:
        # Arrays, not lists: reference counts would copy a list's memory into every loader process.
        self._images, self._masks = (
            np.array([os.fsencode(file) for file in files]) for files in (images, masks)
        )
        self._classes = classes
        self._rules = rules

    def __len__(self) -> int:
        return len(self._images)

    def file_content(self, index: int, /) -> tuple[bytes, Tensor]:
        """Return the content of the image file, and its mask of classes (H, W), uint8."""
        mask = read_mask(self.mask_path(index), self._rules)
        return image_content(self._image(index)), mask if self._classes is None else self._classes[
            mask.long()
        ]

    def path(self, index: int) -> Path:
        """Return the image file of a sample."""
        return Path(self._image(index))

    def mask_path(self, index: int) -> str:
        """Return the mask file of a sample."""
        return os.fsdecode(self._masks[index])

    def _image(self, index: int) -> str:
        return os.fsdecode(self._images[index])


def _evaluated_cityscapes() -> tuple[tuple[str, ...], Tensor]:
    """Return the names of Cityscapes' 19 evaluated classes, and the number in a file → class."""
    evaluated = sorted(
        (entry for entry in Cityscapes.classes if not entry.ignore_in_eval), key=lambda c: c.train_id
    )
    classes = torch.full((256,), _IGNORED, dtype=torch.uint8)
    for entry in evaluated:
        classes[entry.id] = entry.train_id
    return tuple(entry.name for entry in evaluated), classes


_CITYSCAPES_CLASSES, _CITYSCAPES_CLASS_OF = _evaluated_cityscapes()
#: torchvision's class → its splits and files.
MASKED_SETS = {
    "Cityscapes": MaskedSet(
        "split",
        _CITYSCAPES_CLASSES,
        lambda split: [targets[0] for targets in split.targets],
        {"target_type": "semantic"},
        _CITYSCAPES_CLASS_OF,
    ),
    "VOCSegmentation": MaskedSet("image_set", _VOC_CLASSES, lambda split: split.masks),
}
