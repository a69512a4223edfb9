"""Number of samples: images of a folder, sequences of a text, with the ``data.args`` that determine it.

Used by ``plan``, so without torch, and by the data sets.

Legend: T tokens of a sequence.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from hpc_train.experiment.config.fields import PositiveInt, Section
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import expanded

#: Default for a single file.
_VAL_FRACTION = 0.1
_READ_BYTES = 1 << 22
#: A larger part of a split that is not used is reported (assumed).
_MAX_UNUSED = 0.05
#: UTF-8 continuation bytes, which never begin a character.
_CONTINUATION = bytes(range(0x80, 0xC0))
#: Assumed: a user waits this long for a plan; millions of files on a slow shared disk take longer.
COUNT_LIMIT_S = 10.0
#: Assumed: read in about a second; COCO's files have 450 MB.
MAX_ANNOTATIONS_BYTES = 64 << 20
#: Extensions of images in torchvision's ImageFolder.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class TextArgs(Section):
    """``data.args`` of text."""

    sequence_length: PositiveInt = 128
    """T: tokens per sequence."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction at the end of a single file used for validation. 0: none. Default: 0.1."""
    tokens: Literal["characters", "bytes"] = "characters"
    """The unit of tokenization."""


def train_file(root: Path) -> Path:
    """Return the file of the training text."""
    return root / "train.txt" if root.is_dir() else root


def val_tokens(num_tokens: int, args: TextArgs) -> int:
    """Return the number of tokens at the end of a single file that are for validation."""
    return int(num_tokens * (_VAL_FRACTION if args.val_fraction is None else args.val_fraction))


def num_sequences(num_tokens: int, sequence_length: int) -> int:
    """Return the number of whole sequences, each with the token that follows it, in this many tokens."""
    return max(0, num_tokens - 1) // sequence_length


def unused_tokens(part: str, num_tokens: int, sequence_length: int) -> str | None:
    """Return a line if the incomplete sequence at the end of a split is a large part of it; else None."""
    used = 1 + sequence_length * num_sequences(num_tokens, sequence_length)
    if num_tokens - used <= num_tokens * _MAX_UNUSED:
        return None
    return (
        f"the last {num_tokens - used} of the {num_tokens} {part} tokens are not used, since they do not "
        f"fill a sequence of {sequence_length}"
    )


def count_sequences(data: DataConfig) -> int | None:
    """Return N of ``text`` without loading it; None if it is not here, has none, or takes too long."""
    if data.root is None:
        return None
    root = expanded(data.root)
    try:
        args = TextArgs.model_validate(data.args)
        num_tokens = _count_tokens(train_file(root), args)
        is_single = not root.is_dir()
    except (ValidationError, OSError):
        return None
    if num_tokens is None:
        return None
    num_val = val_tokens(num_tokens, args) if is_single else 0
    return num_sequences(num_tokens - num_val, args.sequence_length) or None


def _count_tokens(path: Path, args: TextArgs) -> int | None:
    deadline = time.monotonic() + COUNT_LIMIT_S
    with path.open("rb") as file:
        has_mark = file.read(len(BOM_UTF8)) == BOM_UTF8
        if args.tokens == "bytes":
            return path.stat().st_size - len(BOM_UTF8) * has_mark
        file.seek(0)
        count = -1 if has_mark else 0
        while block := file.read(_READ_BYTES):
            if time.monotonic() > deadline:
                return None
            count += len(block.translate(None, _CONTINUATION))
    return count


def count_annotated_images(data: DataConfig) -> int | None:
    """Return N of ``coco``; None if the file is not here, is damaged, or takes too long to read."""
    if data.root is None:
        return None
    path = expanded(data.root) / "train.json"
    try:
        if not path.is_file() or path.stat().st_size > MAX_ANNOTATIONS_BYTES:
            return None
        return len(json.loads(path.read_bytes())["images"]) or None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def count_images(folder: Path) -> int | None:
    """Count the images in ``folder/<class>/``; None if it is not on this machine or has too many."""
    try:
        classes = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return None
    return _count_below(classes)


def count_masked_images(root: Path) -> int | None:
    """Count the images in ``root/train/images``; None if it is not on this machine or has too many."""
    folder = root / "train" / "images"
    return _count_below([folder]) if folder.is_dir() else None


def _count_below(folders: list[Path]) -> int | None:
    deadline = time.monotonic() + COUNT_LIMIT_S
    count = 0
    for names in itertools.chain.from_iterable(map(_images_by_folder, folders)):
        if time.monotonic() > deadline:
            return None
        count += len(names)
    return count


def image_paths(folder: Path) -> list[str]:
    """Return the paths of the images in ``folder`` and below it, without hidden files."""
    return [path for paths in _images_by_folder(folder) for path in sorted(paths)]


def _images_by_folder(folder: Path) -> Iterator[list[str]]:
    """Yield the paths of the images in ``folder`` and in each folder below it, without hidden files."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = (name for name in names if name[0] != ".")
        yield [f"{parent}/{name}" for name in visible if name.lower().endswith(IMAGE_EXTENSIONS)]
