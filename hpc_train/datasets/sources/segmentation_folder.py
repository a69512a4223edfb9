"""``segmentation_folder``: ``root/{train,val}/images/*`` and ``masks/<same stem>.png`` of class numbers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.image_args import SegmentationFolderArgs
from hpc_train.data_facts.root_layout import validation_folder
from hpc_train.datasets.arguments import parse_args, refuse_rest, root_of
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.sources.imagefolder import images_below
from hpc_train.datasets.sources.infer import mean_and_std
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError

#: PIL modes of one number per pixel: bits, bytes, indices of a palette, 16 and 32 bits.
_NUMBERS = ("1", "L", "P", "I", "I;16", "I;16B")
_SHOWN = 3


class MaskedImages:
    """Image files below ``folder/images`` with the masks below ``folder/masks``, in alphabetical order."""

    def __init__(self, folder: Path, channels: int) -> None:
        self.channels = channels
        self._images, self._masks = os.fspath(folder / "images"), os.fspath(folder / "masks")
        found = [os.fsencode(path.relative_to(self._images)) for path in images_below(folder / "images")]
        if not found:
            raise BadFileError(
                f"data.root: {self._images} contains no images; put some there, or fix the path"
            )
        # An array, not a list: reference counts would copy a list's memory into every loader process.
        self._paths = np.array(found)
        self._refuse_missing_masks()

    def __len__(self) -> int:
        return len(self._paths)

    def file_content(self, index: int, /) -> tuple[bytes, Tensor]:
        """Return what the image file contains, and its mask (H, W), uint8 where the file has 8 bits."""
        with open(self.path(index), "rb", buffering=0) as file:  # noqa: PTH123  (as in imagefolder)
            content = file.read()
        return content, read_mask(self._mask(os.fsdecode(self._paths[index])))

    def path(self, index: int) -> Path:
        """Return the image file of a sample."""
        return Path(self._images, os.fsdecode(self._paths[index]))

    def _mask(self, image: str) -> str:
        return f"{self._masks}/{os.path.splitext(image)[0]}.png"  # noqa: PTH122  (Path: slow for each sample)

    def _refuse_missing_masks(self) -> None:
        masks = {os.fspath(path) for path in images_below(Path(self._masks))}
        images = map(os.fsdecode, self._paths)
        missing = [self._mask(image) for image in images if self._mask(image) not in masks]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise BadFileError(
                f"data.root: {len(missing)} images have no mask: {', '.join(missing[:_SHOWN])}{more} not "
                "found; each needs masks/<name of the image>.png"
            )


def read_mask(path: str) -> Tensor:
    """Return the class numbers of a mask file, (H, W): uint8, or int32 of 16 bits and more."""
    with Image.open(path) as image:
        if image.mode not in _NUMBERS:
            raise BadFileError(
                f"data: its mask {path} has colors (mode {image.mode}); save one class number per pixel as "
                "gray or palette PNG"
            )
        pixels = np.array(image)
    return torch.from_numpy(pixels if pixels.dtype == np.uint8 else pixels.astype(np.int32))


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the splits ``train`` and ``val`` or ``test``; without these there is no validation."""
    refuse_rest(config)
    args = parse_args(SegmentationFolderArgs, config)
    _check_numbers(args)
    root = root_of(config)
    train = MaskedImages(root / "train", args.channels)
    folder = validation_folder(root)
    val = None if folder is None else MaskedImages(folder, args.channels)
    mean, std = mean_and_std(args.channels)
    info = DataInfo(
        args.num_classes,
        args.channels,
        mean,
        std,
        tuple(args.class_names),
        ignore_index=args.ignore_index,
    )
    return DataSource(train, val, info)


def _check_numbers(args: SegmentationFolderArgs) -> None:
    if args.class_names and len(args.class_names) != args.num_classes:
        raise BadFileError(
            f"data.args.class_names: {len(args.class_names)} names for {args.num_classes} classes; write "
            "one per class"
        )
    if args.ignore_index < args.num_classes:
        raise BadFileError(
            f"data.args.ignore_index: {args.ignore_index} is one of the {args.num_classes} classes; write a "
            f"number from {args.num_classes} on, like 255"
        )
