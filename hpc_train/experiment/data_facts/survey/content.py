"""The result of a survey, and the facts of image files that the data sets share."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError, counted, listed, shortened
from hpc_train.experiment.data_facts.file_content import EvenSample

#: Maximum number of files whose header is read: each costs one or two requests to a file server.
SAMPLED = 64
#: Core seconds to decode a pixel. Measured: JPEG by simplejpeg, which can reduce it; PNG by Pillow.
_DECODE_S = {"JPEG": 5e-9}
_DECODE_OTHERS_S = 30e-9
_GRAY = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "F"})
#: Maximum number of names in a remark.
MOST_NAMES = 5
LAYOUTS = (
    "arrange them as train/<class>/*.jpg and val/<class>/*.jpg; as images with a list train.csv; as "
    "train/images and train/masks; as train.json (COCO) with a folder train; or as a text train.txt; for "
    "files of webdataset or huggingface write --data webdataset or huggingface"
)

#: A row of a list of images: the path, and the targets.
Row = tuple[str, ...]


@dataclass(frozen=True)
class Images:
    """Facts of a sample of images. Sides are medians in pixels."""

    width: int
    height: int
    is_one_size: bool
    #: 1 if all are gray.
    channels: int
    #: Core seconds to decode one.
    read_s: float
    number: int
    #: Paths of files that can't be opened as images.
    unreadable: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return size and colors."""
        size = f"{self.width} x {self.height} pixels{'' if self.is_one_size else ' (median)'}"
        return f"{size}, {'gray' if self.channels == 1 else 'color'}"


@dataclass(frozen=True)
class Survey:
    """The content of a data root, as values of ``task`` and ``data``."""

    task: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    #: N of the training data; None: too many to count.
    samples: int | None = None
    has_val: bool = True
    #: Numbers and sizes, in one line.
    summary: str = ""
    #: What may be a mistake, one line each.
    remarks: Sequence[str] = ()
    images: Images | None = None
    #: Another root than the user's, below or above it.
    root: Path | None = None
    #: The reason for ``args``.
    args_reason: str = ""
    #: Split → rows, with a header, of a list that ``init`` writes; ``data.args.train`` and ``val`` name it.
    new_lists: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """Return the summary and the remarks."""
        return [*([self.summary] if self.summary else []), *self.remarks]


#: Formats of images that are looked at. Pillow would start Ghostscript on a file that begins like EPS.
HEADER_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")


def sampled_images(paths: Iterable[str | Path], folder: Path) -> Images:
    """Return facts of an even sample of images by headers. Raises UsageError if none can be opened."""
    from PIL import Image

    kept = EvenSample(paths).kept
    opened: list[tuple[int, int, str, float]] = []
    unreadable: list[str] = []
    for path in kept[:: -(-len(kept) // SAMPLED) or 1]:
        try:
            with Image.open(path, formats=HEADER_FORMATS) as image:
                pixel_s = _DECODE_S.get(image.format or "", _DECODE_OTHERS_S)
                opened.append((*image.size, image.mode, image.width * image.height * pixel_s))
        except Exception:  # any error of Pillow's formats
            unreadable.append(os.fspath(path))
    if not opened:
        raise UsageError(f"--root: no image below {folder} can be opened; check some of its files")
    widths, heights, modes, seconds = zip(*opened, strict=True)
    return Images(
        width=int(statistics.median(widths)),
        height=int(statistics.median(heights)),
        is_one_size=len({*zip(widths, heights, strict=True)}) == 1,
        channels=1 if _GRAY.issuperset(modes) else 3,
        read_s=statistics.mean(seconds),
        number=len(opened),
        unreadable=tuple(unreadable),
    )


def channels_args(images: Images) -> dict[str, Any]:
    """Return the key of ``data.args`` for gray images."""
    return {"channels": 1} if images.channels == 1 else {}


def remarks_of(images: Images, has_val: bool, *others: str) -> list[str]:
    """Return the remarks that are not empty, with those on damaged files and absent validation data."""
    remarks = [remark for remark in others if remark]
    if images.unreadable:
        bad, number = listed(list(images.unreadable), MOST_NAMES), len(images.unreadable)
        remarks.append(f"{number} of {images.number + number} files of a sample can't be opened: {bad}")
    return remarks + no_val(has_val)


def no_val(has_val: bool) -> list[str]:
    """Return the remark on absent validation data, if they are absent."""
    return [] if has_val else ["there are no validation data, so runs are not evaluated"]


def summary_of(train: int, val: int, content: str, images: Images) -> str:
    """Return numbers of images, content, size and colors in one line."""
    return f"{counted(train, 'image')} for training, {val:,} for validation, {content}; {images}"


def class_sizes(counts: Mapping[Any, int]) -> str:
    """Return the number of classes and the range of their sizes in words."""
    low, high = min(counts.values()), max(counts.values())
    sizes = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{len(counts)} classes of {sizes}"


def rare_classes(counts: Mapping[Any, int]) -> list[str]:
    """Return the remarks on classes that can hardly be learned."""
    single = [str(name) for name, count in counts.items() if count == 1]
    remarks = [f"only 1 image of {listed(single, MOST_NAMES)}"] if single else []
    return [*remarks, "there is only one class"] if len(counts) == 1 else remarks


def new_lists_of(header: Row, train: Sequence[Row], val: Sequence[Row]) -> dict[str, list[Row]]:
    """Return split → rows with their header; a split without rows is omitted."""
    lists = {"train": [header, *train], "val": [header, *val]}
    return {split: rows for split, rows in lists.items() if len(rows) > 1}


def without_fifth(rows: Sequence[Row], *, has_classes: bool = True) -> tuple[list[Row], list[Row], str]:
    """Return training rows, validation rows (a fifth, per class if any, by hash of path) and a remark."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[1:] if has_classes else (), []).append(row)
    val: set[Row] = set()
    for group in groups.values():
        group.sort(key=lambda row: sha256(row[0].encode()).digest())
        val.update(group[: len(group) // 5 or int(len(group) > 2)])
    whose = "of each class " if has_classes else ""
    remark = f"no validation images, so init wrote lists: a fifth {whose}is for validation"
    return [row for row in rows if row not in val], [row for row in rows if row in val], remark


def entries(folder: Path) -> str:
    """Return the first names in a folder."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    return listed([shortened(name) for name in names], MOST_NAMES) or "nothing"
