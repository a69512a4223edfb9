"""``imagefolder``: ``root/train/<class>/*`` and ``root/val`` or ``root/test``, the layout of ImageNet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from hpc_train.errors import BadFileError, listed
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import IMAGE_EXTENSIONS
from hpc_train.experiment.data_facts.image_facts import ImageFolderArgs
from hpc_train.experiment.data_facts.root_layout import class_folders, validation_folder
from hpc_train.training.datasets import decoding, images, packed, packing
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.sources import infer, named_files, values
from hpc_train.training.datasets.sources.image_files import Skipped, images_below


class FolderSplit:
    """The images below ``folder/<class>``, classes and files in alphabetical order."""

    def __init__(
        self,
        folder: Path,
        class_names: tuple[str, ...],
        channels: int,
        skipped: Skipped,
        *,
        may_lack_classes: bool = False,
    ) -> None:
        self._folder = os.fspath(folder)
        self.channels = channels
        paths: list[bytes] = []
        counts: list[int] = []
        for name in class_names:
            files = [os.fsencode(path.relative_to(folder)) for path in images_below(folder / name, skipped)]
            if not files and not may_lack_classes:
                raise BadFileError(
                    f"data.root: {folder / name} contains no image ({', '.join(IMAGE_EXTENSIONS)}); "
                    "add some, or remove it"
                )
            paths += files
            counts.append(len(files))
        self.folder = folder
        # Arrays, not lists: reference counts would copy a list's memory into every loader process.
        #: Paths of the files, relative to ``folder``.
        self.paths = np.array(paths)
        self.classes = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        content, target = self.file_content(index)
        return decoding.decode(content, self.channels), target

    def file_content(self, index: int, /) -> tuple[bytes, int]:
        """Return the content of a sample's file, and the sample's class."""
        return images.image_content(self._file(index)), int(self.classes[index])

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return Path(self._file(index))

    def _file(self, index: int) -> str:
        return f"{self._folder}/{os.fsdecode(self.paths[index])}"


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the two splits; without ``val`` and ``test`` there is no validation.

    With ``data.cache`` they are the splits of a pack, which ``prepare`` (``download``) writes.
    """
    refuse_rest(config)
    args = parse_args(ImageFolderArgs, config)
    root = root_of(config)
    if config.cache is None:
        return folder_source(root, args.channels)
    if not download:
        return _packed_source(config, root, args.channels)
    files = folder_source(root, args.channels)
    packing.ensure(config, lambda: files)
    return replace(_packed_source(config, root, args.channels), notices=files.notices, packed_from=files)


def folder_source(root: Path, channels: int) -> DataSource:
    """Return the images below ``root``, to be read file by file."""
    skipped = Skipped(root)
    class_names = class_folders(root / "train")
    train = FolderSplit(root / "train", class_names, channels, skipped)
    folder = validation_folder(root)
    val = None if folder is None else _val_split(folder, class_names, channels, skipped)
    for split in (train, val):
        if split is not None:
            skipped.add_beside_classes(split.folder)
    skipped.add_unused_folders([root / "train", folder])
    notices = [*skipped.notices(), *_class_notices(val, class_names)]
    return DataSource(train, val, infer.image_info(class_names, channels), notices=tuple(notices))


def _class_notices(val: FolderSplit | None, class_names: tuple[str, ...]) -> list[str]:
    counts = [1] if val is None else np.bincount(val.classes, minlength=len(class_names))
    absent = [name for name, count in zip(class_names, counts, strict=False) if count == 0]
    remarks = [f"{val.folder} has no image of {listed(absent, 5)}"] if val and absent else []
    numbers = [int(name) for name in class_names if name.isascii() and name.isdigit()]
    if len(numbers) == len(class_names) and numbers != sorted(numbers):
        place = next(place for place, number in enumerate(sorted(numbers)) if number != numbers[place])
        remarks.append(
            f"folders are numbered in alphabetical order, so {class_names[place]} is class number {place}; "
            "pad the names with zeros (001) to number them by size"
        )
    return [f"data.root: {remark}" for remark in (*named_files.spelling_remarks(class_names), *remarks)]


def _packed_source(config: DataConfig, root: Path, channels: int) -> DataSource:
    pack = packed.find_pack(config)
    train = packed.open_split(pack, "train", root, channels)
    val = packed.open_split(pack, "val", root, channels) if "val" in pack.parts else None
    return DataSource(train, val, infer.image_info(pack.class_names, channels))


def _val_split(folder: Path, class_names: tuple[str, ...], channels: int, skipped: Skipped) -> FolderSplit:
    """Return the images of the classes of train; a class may have none. Raises BadFileError for others."""
    if unknown := sorted(set(class_folders(folder)) - set(class_names)):
        for name in class_names:
            if values.alike(name) == values.alike(unknown[0]):
                raise BadFileError(
                    f"data.root: {folder} has the class {unknown[0]!a}, and train has {name!a}; "
                    "spell them the same"
                )
        raise BadFileError(
            f"data.root: {folder} has classes that train has not: {listed(unknown, 5)}; "
            f"put images of them into {folder.parent / 'train'}, or remove them"
        )
    return FolderSplit(folder, class_names, channels, skipped, may_lack_classes=True)
