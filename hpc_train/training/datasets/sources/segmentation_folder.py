"""``segmentation_folder``: ``root/{train,val}/images/*`` and ``masks/<same stem>.png`` of class numbers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.image_facts import MASK_MODES, SCALED_MASKS, SegmentationFolderArgs
from hpc_train.experiment.data_facts.root_layout import validation_folder
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.images import (
    DEFAULT_RULES,
    UPRIGHT,
    PixelRules,
    image_content,
    open_image,
    orientation_of,
    turned_upright,
)
from hpc_train.training.datasets.sources.image_files import Skipped, images_below
from hpc_train.training.datasets.sources.infer import image_info

_SHOWN = 3
#: The label of ignored pixels if the value in the masks is a class number.
_IGNORED = 255
_DEFAULT_IGNORED = SegmentationFolderArgs.model_fields["ignore_index"].default
#: Formats of Pillow that always change values.
_LOSSY = ("JPEG", "MPO")


class MaskedFiles:
    """Image files and their masks."""

    def __init__(
        self,
        images: Iterable[str],
        masks: Iterable[str],
        channels: int,
        rules: PixelRules,
        classes: Tensor | None,
    ) -> None:
        """``classes``: number in a mask → class, a negative one is an error; None: they are the same."""
        # Arrays, not lists: reference counts would copy a list's memory into every loader process.
        self._images, self._masks = (
            np.array([os.fsencode(file) for file in files]) for files in (images, masks)
        )
        self.channels = channels
        self._rules = rules
        self._classes = classes

    def __len__(self) -> int:
        return len(self._images)

    def file_content(self, index: int, /) -> tuple[bytes, Tensor]:
        """Return the content of the image file, and its mask (H, W), uint8 if the file has 8 bits."""
        content = image_content(self._image(index))
        mask = read_mask(self.mask_path(index), self._rules)
        return content, mask if self._classes is None else self._as_classes(mask, index)

    def path(self, index: int) -> Path:
        """Return the image file of a sample."""
        return Path(self._image(index))

    def mask_path(self, index: int) -> str:
        """Return the mask file of a sample."""
        return os.fsdecode(self._masks[index])

    def _image(self, index: int) -> str:
        return os.fsdecode(self._images[index])

    def _as_classes(self, mask: Tensor, index: int) -> Tensor:
        assert self._classes is not None
        classes = self._classes[mask.long()]
        if classes.dtype.is_signed and (unlisted := mask[classes < 0]).numel():
            raise BadFileError(
                f"data: its mask {self.mask_path(index)} has the value {int(unlisted[0])}, which is neither "
                "in data.args.mask_values nor ignore_index; add it there, or fix the mask"
            )
        return classes.to(mask.dtype)


def _masked_folder(
    folder: Path, args: SegmentationFolderArgs, rules: PixelRules, skipped: Skipped
) -> MaskedFiles:
    """Return the images below ``folder/images`` with the masks below ``folder/masks``, in the order of names.

    Raises BadFileError unless each has a mask of its own.
    """
    images, masks = os.fspath(folder / "images"), os.fspath(folder / "masks")
    paths = [os.fspath(path) for path in images_below(Path(images), skipped)]
    if not paths:
        raise BadFileError(f"data.root: {images} contains no images; put some there, or fix the path")
    stems = (os.path.splitext(path)[0].removeprefix(images) for path in paths)  # noqa: PTH122  (Path: slow)
    wanted = [f"{masks}{stem}.png" for stem in stems]
    present = {os.fspath(path) for path in images_below(Path(masks), skipped)}
    if shared := [mask for mask, count in Counter(wanted).items() if count > 1]:
        raise BadFileError(
            f"data.root: several images of {images} have the name of the mask {shared[0]} "
            "(such as a.jpg and a.png); remove all but one, or rename them and give each a mask"
        )
    for mask in sorted(present.difference(wanted)):
        skipped.add(skipped.MASK, Path(mask))
    if missing := [mask for mask in wanted if mask not in present]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise BadFileError(
            f"data.root: {len(missing)} images have no mask: {', '.join(missing[:_SHOWN])}{more} not "
            "found; each needs masks/<name of the image>.png"
        )
    return MaskedFiles(paths, wanted, args.channels, rules, _classes_of_values(args))


def read_mask(path: str, rules: PixelRules = DEFAULT_RULES) -> Tensor:
    """Return the numbers in a mask file, (H, W): uint8, or int32 for 16 bits and more."""
    with open_image(image_content(path), rules.max_pixels) as image:
        if image.mode not in MASK_MODES:
            raise BadFileError(
                f"data: its mask {path} has colors (mode {image.mode}); save one class number per pixel as "
                "gray or palette PNG"
            )
        if image.format in _LOSSY:
            raise BadFileError(
                f"data: its mask {path} is {image.format}, whose compression changes class numbers; write it "
                "again as PNG, from the original"
            )
        factor = SCALED_MASKS.get(str(image.tile[0][3])) if image.tile else None
        pixels = np.array(image)
        orientation = orientation_of(image) if rules.applies_orientation else UPRIGHT
    if factor is not None:
        pixels //= factor
    mask = torch.from_numpy(pixels if pixels.dtype == np.uint8 else pixels.astype(np.int32))
    return turned_upright(mask[None], orientation)[0]


def _classes_of_values(args: SegmentationFolderArgs) -> Tensor | None:
    """Return the class of each 16-bit value, (65536,) int32, -1 for none; None: values are classes."""
    if not args.mask_values:
        return None
    classes = torch.full((1 << 16,), -1, dtype=torch.int32)
    classes[args.ignore_index] = _ignored_label(args)
    classes[torch.tensor(args.mask_values)] = torch.arange(len(args.mask_values), dtype=torch.int32)
    return classes


def _ignored_label(args: SegmentationFolderArgs) -> int:
    """Return the label of ignored pixels, which is not a class."""
    return args.ignore_index if args.ignore_index >= args.num_classes else _IGNORED


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the splits ``train`` and ``val`` or ``test``; without these there is no validation."""
    refuse_rest(config)
    args = parse_args(SegmentationFolderArgs, config)
    _check_numbers(args)
    root, rules = root_of(config), PixelRules.of(config)
    skipped = Skipped(root)
    train = _masked_folder(root / "train", args, rules, skipped)
    folder = validation_folder(root)
    val = None if folder is None else _masked_folder(folder, args, rules, skipped)
    skipped.add_unused_folders([root / "train", folder])
    sizes = (args.channels, args.num_classes)
    info = image_info(args.class_names, *sizes, ignore_index=_ignored_label(args))
    return DataSource(train, val, info, notices=skipped.notices())


def _check_numbers(args: SegmentationFolderArgs) -> None:
    if args.class_names and len(args.class_names) != args.num_classes:
        raise BadFileError(
            f"data.args.class_names: {len(args.class_names)} names for {args.num_classes} classes; write "
            "one per class"
        )
    values = args.mask_values
    if args.ignore_index < args.num_classes and not values:
        raise BadFileError(
            f"data.args.ignore_index: {args.ignore_index} is one of the {args.num_classes} classes; write a "
            f"number from {args.num_classes} on, like 255, or name the classes in data.args.mask_values"
        )
    if args.ignore_index in values and args.ignore_index != _DEFAULT_IGNORED:
        raise BadFileError(
            f"data.args.ignore_index: {args.ignore_index} is one of data.args.mask_values; write another"
        )
    if values and (len(values) != args.num_classes or len(set(values)) < len(values)):
        raise BadFileError(
            f"data.args.mask_values: {len(set(values))} different values for {args.num_classes} classes; "
            "write one per class"
        )
