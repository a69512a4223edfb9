"""How many training samples the data have, without torch: what a login node can count or look up."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from hpc_train.config.training_sections import DataConfig
from hpc_train.paths import expanded
from hpc_train.plan.text import TextArgs, training_sequences
from hpc_train.registry import is_factory, split_name

#: Assumed: a person waits that long for a plan; millions of files on a slow shared disk take longer.
COUNT_LIMIT_S = 10.0
#: scikit-learn's 1,797 digits without every fifth, which is validation.
_DIGITS = 1438
#: What ``synthetic`` makes where ``data.args`` says nothing.
_SYNTHETIC_DEFAULT = 1024
#: Training parts of torchvision's data sets, as their authors publish them.
_TORCHVISION = {
    "CIFAR10": 50_000,
    "CIFAR100": 50_000,
    "Country211": 31_650,
    "DTD": 1_880,
    "FGVCAircraft": 3_334,
    "FashionMNIST": 60_000,
    "Flowers102": 1_020,
    "Food101": 75_750,
    "GTSRB": 26_640,
    "ImageNet": 1_281_167,
    "KMNIST": 60_000,
    "MNIST": 60_000,
    "OxfordIIITPet": 3_680,
    "PCAM": 262_144,
    "QMNIST": 60_000,
    "RenderedSST2": 6_920,
    "STL10": 5_000,
    "SVHN": 73_257,
    "StanfordCars": 8_144,
    "USPS": 7_291,
}
#: Extensions that torchvision's ImageFolder takes for images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def training_samples(data: DataConfig) -> int | None:
    """Return N; None where only the data set's own code knows it."""
    if is_factory(data.name):
        return None
    provider, rest = split_name(data.name)
    match provider:
        case "digits":
            return _DIGITS
        case "synthetic":
            given = data.args.get("num_samples", _SYNTHETIC_DEFAULT)
            return given if type(given) is int else None
        case "torchvision":
            # An argument may choose another part of the data.
            return None if data.args else _TORCHVISION.get(rest)
        case "imagefolder":
            return _count_images(expanded(data.root) / "train") if data.root else None
        case "text":
            return _count_sequences(data)
    return None


def _count_sequences(data: DataConfig) -> int | None:
    """Count the sequences of a text; None where there are none: why not is the data set's to say."""
    if data.root is None:
        return None
    try:
        args = TextArgs.model_validate(data.args)
    except ValidationError:
        return None
    return training_sequences(expanded(data.root), args, COUNT_LIMIT_S) or None


def _count_images(folder: Path) -> int | None:
    """Count the images in ``folder/<class>/``; None where there is no such folder here, or too much of it."""
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
    """Yield how many images lie in ``folder`` and in each folder below it, hidden ones left out."""
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield sum(name.lower().endswith(IMAGE_EXTENSIONS) and name[0] != "." for name in names)
