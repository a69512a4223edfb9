"""How many images a folder has, without torch."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

#: Assumed: a person waits that long for a plan; millions of files on a slow shared disk take longer.
COUNT_LIMIT_S = 10.0
#: Extensions that torchvision's ImageFolder takes for images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def count_images(folder: Path) -> int | None:
    """Count the images in ``folder/<class>/``; None if it is not on this machine or has too many."""
    deadline = time.monotonic() + COUNT_LIMIT_S
    try:
        classes = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return None
    count = 0
    for number in itertools.chain.from_iterable(map(_images_by_folder, classes)):
        if time.monotonic() > deadline:
            return None
        count += number
    return count


def _images_by_folder(folder: Path) -> Iterator[int]:
    """Yield the number of images in ``folder`` and in each folder below it, without hidden ones."""
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield sum(name.lower().endswith(IMAGE_EXTENSIONS) and name[0] != "." for name in names)
