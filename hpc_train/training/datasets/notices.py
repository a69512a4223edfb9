"""The notices of ``prepare`` and rank 0 about the data: skipped files, lossy conversions, masks.

Image files and masks are inspected in a sample, so the time is bounded for any number of files.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from PIL import Image, ImageFile

from hpc_train.errors import listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import expanded
from hpc_train.training.datasets import decoding, images
from hpc_train.training.datasets.base import DataSource, FileSplit
from hpc_train.training.datasets.normalize import mean_and_std
from hpc_train.training.datasets.types import Batch, DataInfo

#: Files of each split that are inspected, evenly spaced (assumed: seconds on a slow file server).
INSPECTED = 32
#: Data sets whose training data are all images below ``root/train``.
_FOLDERS = ("imagefolder", "segmentation_folder")
#: Larger values of floats are not those of normalized images (assumed).
_MAX_NORMALIZED = 32
#: Formats with several images per file of which the others are previews.
_PREVIEWS = ("JPEG", "MPO")
_LOSSES = {
    "gray": "have 16 bits per pixel (values {low:g} to {high:g}), of which the upper 8 bits are used{dark}; "
    "to scale them, write data.value_range: [black, white], such as [0, 4095] for 12 bits",
    "clipped": "have values of {low:g} to {high:g}, which data.value_range clips; widen it if needed",
    "colors": "have 16 bits per color, of which the upper 8 bits are used; if the values need fewer bits, "
    "store them as 8 bits per color",
    "alpha": "have transparent pixels, of which the colors are used and the transparency is dropped; "
    "blend them with a background if it matters",
    "orientation": "have an EXIF orientation, which is not applied; write data.exif_orientation: apply to "
    "turn them",
    "mask": "have another EXIF orientation than their masks; store both upright",
    "frames": "have several frames or pages, of which the first is used; store each as a file",
    "bands": "have more than three bands, of which the first three are used as red, green and blue; write a "
    "data set that returns all of them",
    "palette": "have masks in which a class number has another color of the palette than in masks before; if "
    "the colors are the classes, their numbers are wrong: save all masks with one palette",
    "shared": "are validation images that the training data contain too, so the evaluation is too good; "
    "remove them from one of the two",
    "cmyk": "are CMYK, which is converted to RGB without a color profile; convert them if colors matter",
}


def data_notices(source: DataSource, data: DataConfig, *, more_masks_s: float = 0.0) -> list[str]:
    """Return lines to print once per data set. Reads up to ``INSPECTED`` files per split.

    ``more_masks_s``: time limit for reading further training masks if the first ones lack classes.
    """
    root = Path(expanded(data.root)) if data.root and data.name in _FOLDERS else None
    inspected = _Inspection(images.PixelRules.of(data), source.info, root)
    files = source.packed_from or source
    for name, split in (("train", files.train), ("val", files.val)):
        if isinstance(split, FileSplit):
            inspected.inspect(name, split)
    if isinstance(files.train, FileSplit) and more_masks_s:
        inspected.inspect_masks("train", files.train, more_masks_s)
    return [*source.notices, *inspected.losses(), *inspected.masks(data, whole_only=not more_masks_s)]


def batch_notices(batches: Sequence[Batch], info: DataInfo, data: DataConfig) -> Iterator[str]:
    """Yield lines on images whose values can't be in the range that they count as.

    Floats count as normalized, and normalized images have negative values. ``batches``: as the loader returns
    them, of training and, if there are any, of validation samples.
    """
    train, *others = (batch.inputs for batch in batches)
    if not isinstance(train, torch.Tensor) or train.dim() != 4 or train.numel() == 0:
        return
    low, high = (float(value) for value in train.aminmax())
    requested = data.normalize is not None or data.transform is not None
    if not train.is_floating_point():
        if train.dtype == torch.uint8 and high <= 1:
            yield f"data: images are bytes from 0 to {high:g}, and bytes are divided by 255; return 0 to 255"
    elif high > _MAX_NORMALIZED:
        yield (
            f"data: images are floats of {low:.3g} to {high:.3g}, and floats count as normalized; return "
            "bytes, or (x - mean) / std"
        )
    elif requested and 0 <= low < high and any(mean > 0 for mean in mean_and_std(info, data)[0]):
        yield (
            f"data: training images are floats of {low:.3g} to {high:.3g}, which count as normalized: mean "
            "and standard deviation are applied to bytes only; return bytes, or apply them in data.transform "
            "or the data set"
        )
    elif data.normalize is None and any(getattr(inputs, "dtype", None) == torch.uint8 for inputs in others):
        key = "data" if data.transform is None else "data.transform"
        yield (
            f"{key}: training images are floats of {low:.3g} to {high:.3g}, which count as normalized, "
            "and validation images are normalized by the mean and standard deviation of the data set; "
            "write those of the training images as data.normalize"
        )


class _Inspection:
    """Conversions that lose information, and class numbers in masks, of a sample of image files."""

    def __init__(self, rules: images.PixelRules, info: DataInfo, root: Path | None = None) -> None:
        """``root``: the folder of the splits if each contains all images below its folder."""
        self._rules, self._info, self._root = rules, info, root
        #: Number in a mask with a palette → its color.
        self._colors: dict[int, list[int]] = {}
        self._num_files = 0
        #: Of the contents of inspected training files.
        self._train_hashes: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._ranges: dict[str, tuple[float, float]] = {}
        #: By split: indices of the masks that were read, number of masks, and value → number of pixels.
        self._seen: dict[str, set[int]] = {"train": set(), "val": set()}
        self._sizes: dict[str, int] = {}
        self._values: dict[str, Counter[int]] = {"train": Counter(), "val": Counter()}
        #: Masks with values that are neither classes nor ignored.
        self._unfit: list[str] = []

    def inspect(self, name: str, split: Any) -> None:
        """Add a sample of a split's files; unreadable files are left to the readers."""
        self._sizes[name] = len(split)
        count = min(len(split), INSPECTED)
        for index in torch.linspace(0, len(split) - 1, count, dtype=torch.float64).round().long().tolist():
            try:
                content, target = split.file_content(index)
                if not decoding.is_decoded(content):
                    self._inspect_file(split, index, content)
                    digest = xxhash.xxh3_128_hexdigest(content)
                    if name == "train":
                        self._train_hashes.add(digest)
                    elif digest in self._train_hashes or self._is_in_train(split, index, content):
                        self._note("shared", str(images.sample_path(split, index) or f"sample {index}"))
            except Exception:  # any error of a source or Pillow: reading the sample reports it
                continue
            self._add_mask(name, split, index, target)

    def inspect_masks(self, name: str, split: Any, limit_s: float) -> None:
        """Add further masks, in random order, until all classes have occurred, for at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        if not self._seen[name]:
            return
        for index in torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist():
            if not self._absent(name) or time.monotonic() > deadline:
                return
            if index not in self._seen[name]:
                with suppress(Exception):  # as above
                    self._add_mask(name, split, index, split.file_content(index)[1])

    def _add_mask(self, name: str, split: Any, index: int, target: Any) -> None:
        ignored = self._info.ignore_index
        if ignored is None or not isinstance(target, torch.Tensor) or target.dim() != 2:
            return
        self._seen[name].add(index)
        values, counts = target.unique(return_counts=True)
        self._values[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if any(value != ignored and not 0 <= value < self._info.num_classes for value in values.tolist()):
            path = split.mask_path(index) if hasattr(split, "mask_path") else f"sample {index}"
            self._unfit.append(str(path))

    def _classes(self, *names: str) -> list[int]:
        """Return the classes that occur in the masks of the splits."""
        values = set().union(*(self._values[name] for name in names))
        return sorted(value for value in values if 0 <= value < self._info.num_classes)

    def _absent(self, name: str) -> list[int]:
        return sorted(set(range(self._info.num_classes)).difference(self._classes(name)))

    def losses(self) -> Iterator[str]:
        """Yield one line per kind of loss."""
        for kind, count in self._counts.items():
            low, high = self._ranges.get(kind, (0, 0))
            loss = _LOSSES[kind].format(low=low, high=high, dark=", so they are black" if high < 256 else "")
            yield (
                f"data: {count} of {self._num_files} inspected images {loss} (first: {self._examples[kind]})"
            )

    def masks(self, data: DataConfig, *, whole_only: bool) -> Iterator[str]:
        """Yield lines on classes that do not occur in the masks, and values that are not classes.

        ``whole_only``: report rare classes only if all training masks were read.
        """
        if not any(self._seen.values()) or self._info.num_classes < 2:
            return
        if self._unfit:
            yield self._unfit_values()
        if len(self._classes("train", "val")) < 2:
            yield self._one_class(data)
            return
        is_whole = len(self._seen["train"]) == self._sizes["train"]
        if self._seen["train"] and self._absent("train") and (is_whole or not whole_only):
            yield self._absent_classes()

    def _one_class(self, data: DataConfig) -> str:
        ignored, num_classes = self._info.ignore_index, self._info.num_classes
        classes = self._classes("train", "val")
        occurs = f"only class {classes[0]} occurs" if classes else "no class occurs"
        absent = [number for number in range(num_classes) if number not in classes]
        count = sum(map(len, self._seen.values()))
        line = f"data: {occurs} in the {count} inspected masks"
        if num_classes == 2 and len(absent) == 1:
            line += f", class {absent[0]} nowhere"
        values = self._values["train"] + self._values["val"]
        if share := values[ignored or 0] if ignored in values else 0:
            line += f"; {share / values.total():.0%} of their pixels are {ignored}, which is ignored"
        is_folder = data.name == "segmentation_folder"
        if is_folder and share and num_classes == 2 and len(classes) == 1:
            line += f"; if {ignored} is a class, write data.args: {{mask_values: [{classes[0]}, {ignored}]}}"
        return f"{line}; nothing else can be learned from such masks"

    def _absent_classes(self) -> str:
        absent, seen, size = self._absent("train"), len(self._seen["train"]), self._sizes["train"]
        which = f"the {seen} training masks" if seen == size else f"{seen} of the {size} training masks"
        line = f"data: {len(absent)} of {self._info.num_classes} classes occur in none of {which}: "
        line += self._names(absent)
        if in_val := sorted(set(absent).intersection(self._classes("val"))):
            line += f"; validation masks have {self._names(in_val)}"
        return line

    def _unfit_values(self) -> str:
        ignored, num_classes = self._info.ignore_index, self._info.num_classes
        values = self._values["train"].keys() | self._values["val"].keys()
        unfit = sorted(value for value in values if value != ignored and not 0 <= value < num_classes)
        count = sum(map(len, self._seen.values()))
        return (
            f"data: {len(self._unfit)} of the {count} inspected masks have values that are neither classes "
            f"(0 to {num_classes - 1}) nor {ignored}, which is ignored: {listed(list(map(str, unfit)), 5)} "
            f"(first: {self._unfit[0]}); such masks can't be used: fix them, or the number of classes"
        )

    def _names(self, classes: Sequence[int]) -> str:
        names = self._info.class_names
        shown = [f"{shortened(names[number])} ({number})" if names else str(number) for number in classes]
        return listed(shown, 10)

    def _inspect_file(self, split: Any, index: int, content: bytes | bytearray) -> None:
        path = images.sample_path(split, index)
        name = f"sample {index}" if path is None else str(path)
        with images.open_image(content, self._rules.max_pixels) as image:
            self._num_files += 1
            for kind, low, high in self._losses_of(image):
                before = self._ranges.get(kind, (low, high))
                self._ranges[kind] = min(low, before[0]), max(high, before[1])
                self._note(kind, name)
            orientation = images.orientation_of(image)
        if orientation != images.UPRIGHT and not self._rules.applies_orientation:
            self._note("orientation", name)
        if hasattr(split, "mask_path"):
            with images.open_image(
                images.image_content(split.mask_path(index)), self._rules.max_pixels
            ) as mask:
                mask.load()
                if images.orientation_of(mask) != orientation:
                    self._note("mask", name)
                if mask.mode == "P" and not self._has_known_colors(mask):
                    self._note("palette", name)

    def _has_known_colors(self, mask: Image.Image) -> bool:
        """Return True unless a number in the mask has another color than in a mask before."""
        palette, numbers = mask.getpalette() or [], np.unique(np.asarray(mask)).tolist()
        colors = {number: palette[3 * number : 3 * number + 3] for number in numbers}
        return all(self._colors.setdefault(number, color) == color for number, color in colors.items())

    def _is_in_train(self, split: Any, index: int, content: bytes | bytearray) -> bool:
        """Return True if the sample is a link into train, or train contains it with the same name."""
        path = images.sample_path(split, index)
        if self._root is None or path is None:
            return False
        train, (_, *inner) = self._root / "train", path.relative_to(self._root).parts
        same = train.joinpath(*inner)
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(train)):
            return True
        if not same.is_file() or same.stat().st_size != len(content):
            return False
        return images.image_content(os.fspath(same)) == content

    def _note(self, kind: str, name: str) -> None:
        self._counts[kind] += 1
        self._examples.setdefault(kind, name)

    def _losses_of(self, image: ImageFile.ImageFile) -> Iterator[tuple[str, float, float]]:
        """Yield each kind of loss; for gray values with the minimum and maximum, else with zeros."""
        if getattr(image, "n_frames", 1) > 1 and image.format not in _PREVIEWS:
            yield "frames", 0, 0
        if decoding.has_sixteen_bit_colors(image):
            yield "colors", 0, 0
        if decoding.has_more_bands(image):
            yield "bands", 0, 0
        if image.mode == "CMYK":
            yield "cmyk", 0, 0
        if _is_transparent(image):
            yield "alpha", 0, 0
        value_range = self._rules.value_range
        if images.has_sixteen_bits(image) or (value_range is not None and image.mode in {"I", "F"}):
            values = np.asarray(image)  # getextrema refuses big-endian TIFF files
            low, high = float(values.min()), float(values.max())
            if value_range is None:
                yield "gray", low, high
            elif low < value_range[0] or high > value_range[1]:
                yield "clipped", low, high


def _is_transparent(image: Image.Image) -> bool:
    if image.mode == "PA" or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "LAB" or "A" not in image.getbands():
        return False
    lowest, _ = cast(tuple[int, int], image.getchannel("A").getextrema())
    return lowest < 255
