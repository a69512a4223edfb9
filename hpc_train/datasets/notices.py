"""The notices of ``prepare`` and rank 0 about the data: skipped files, lossy conversions, masks.

Image files and masks are inspected in a sample, so the time is bounded for any number of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from PIL import Image, ImageFile

from hpc_train.config.training_sections import DataConfig
from hpc_train.datasets.base import DataSource, FileSplit
from hpc_train.datasets.decoding import has_sixteen_bit_colors, is_decoded
from hpc_train.datasets.images import (
    UPRIGHT,
    PixelRules,
    has_sixteen_bits,
    image_content,
    open_image,
    orientation_of,
    sample_path,
)

#: Files of each split that are inspected, evenly spaced (assumed: seconds on a slow file server).
INSPECTED = 32
#: Formats in which one file may have several images that are read; JPEG's others are previews.
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
    "cmyk": "are CMYK, which is converted to RGB without a color profile; convert them if colors matter",
}


def data_notices(source: DataSource, data: DataConfig) -> list[str]:
    """Return lines to print once per data set. Reads up to ``INSPECTED`` files per split."""
    inspected = _Inspection(PixelRules.of(data))
    files = source.packed_from or source
    for split in (files.train, files.val):
        if isinstance(split, FileSplit):
            inspected.inspect(split, source.info.ignore_index)
    return [*source.notices, *inspected.losses(), *inspected.masks(source, data)]


class _Inspection:
    """Conversions that lose information, and class numbers in masks, of a sample of image files."""

    def __init__(self, rules: PixelRules) -> None:
        self._rules = rules
        self._num_files = 0
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._ranges: dict[str, tuple[float, float]] = {}
        self._num_masks = 0
        #: Value in the masks → number of pixels.
        self._values: Counter[int] = Counter()

    def inspect(self, split: Any, ignored: int | None) -> None:
        """Add a sample of a split's files; those that can't be read are left to the readers."""
        count = min(len(split), INSPECTED)
        for index in torch.linspace(0, len(split) - 1, count, dtype=torch.float64).round().long().tolist():
            try:
                content, target = split.file_content(index)
                if not is_decoded(content):
                    self._inspect_file(split, index, content)
            except Exception:  # whatever a source or Pillow raises: reading the sample reports it
                continue
            if ignored is not None and isinstance(target, torch.Tensor) and target.dim() == 2:
                self._num_masks += 1
                values, counts = target.unique(return_counts=True)
                self._values.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def losses(self) -> Iterator[str]:
        """Yield one line per kind of loss."""
        for kind, count in self._counts.items():
            low, high = self._ranges.get(kind, (0, 0))
            words = _LOSSES[kind].format(low=low, high=high, dark=", so they are black" if high < 256 else "")
            yield (
                f"data: {count} of {self._num_files} inspected images {words} (first: {self._examples[kind]})"
            )

    def masks(self, source: DataSource, data: DataConfig) -> Iterator[str]:
        """Yield a line if at most one class occurs in the inspected masks."""
        ignored, num_classes = source.info.ignore_index, source.info.num_classes
        classes = sorted(value for value in self._values if value != ignored)
        if not self._num_masks or num_classes < 2 or len(classes) > 1:
            return
        occurs = f"only class {classes[0]} occurs" if classes else "no class occurs"
        absent = [number for number in range(num_classes) if number not in classes]
        words = f"data: {occurs} in the {self._num_masks} inspected masks"
        if num_classes == 2 and len(absent) == 1:
            words += f", class {absent[0]} nowhere"
        if share := self._values[ignored or 0] if ignored in self._values else 0:
            words += f"; {share / self._values.total():.0%} of their pixels are {ignored}, which is ignored"
        is_folder = data.name == "segmentation_folder"
        if is_folder and share and num_classes == 2 and len(classes) == 1:
            words += f"; if {ignored} is a class, write data.args: {{mask_values: [{classes[0]}, {ignored}]}}"
        yield f"{words}; nothing else can be learned from such masks"

    def _inspect_file(self, split: Any, index: int, content: bytes | bytearray) -> None:
        path = sample_path(split, index)
        name = f"sample {index}" if path is None else str(path)
        with open_image(content, self._rules.max_pixels) as image:
            self._num_files += 1
            for kind, low, high in self._losses_of(image):
                before = self._ranges.get(kind, (low, high))
                self._ranges[kind] = min(low, before[0]), max(high, before[1])
                self._note(kind, name)
            orientation = orientation_of(image)
        if orientation != UPRIGHT and not self._rules.applies_orientation:
            self._note("orientation", name)
        if hasattr(split, "mask_path"):
            with open_image(image_content(split.mask_path(index)), self._rules.max_pixels) as mask:
                mask.load()
                if orientation_of(mask) != orientation:
                    self._note("mask", name)

    def _note(self, kind: str, name: str) -> None:
        self._counts[kind] += 1
        self._examples.setdefault(kind, name)

    def _losses_of(self, image: ImageFile.ImageFile) -> Iterator[tuple[str, float, float]]:
        """Yield each kind of loss, with the smallest and largest value if it is one of gray values."""
        if getattr(image, "n_frames", 1) > 1 and image.format not in _PREVIEWS:
            yield "frames", 0, 0
        if has_sixteen_bit_colors(image):
            yield "colors", 0, 0
        if image.mode == "CMYK":
            yield "cmyk", 0, 0
        if _is_transparent(image):
            yield "alpha", 0, 0
        given = self._rules.value_range
        if has_sixteen_bits(image) or (given is not None and image.mode in {"I", "F"}):
            low, high = cast(tuple[float, float], image.getextrema())
            if given is None:
                yield "gray", low, high
            elif low < given[0] or high > given[1]:
                yield "clipped", low, high


def _is_transparent(image: Image.Image) -> bool:
    if image.mode == "PA" or "transparency" in image.info:
        image = image.convert("RGBA")
    if "A" not in image.getbands():
        return False
    lowest, _ = cast(tuple[int, int], image.getchannel("A").getextrema())
    return lowest < 255
