"""The sizes of torchvision's data sets, as their authors publish them."""

from __future__ import annotations

from hpc_train.config.training_sections import DataConfig
from hpc_train.registry import split_name

#: Number of samples in the training splits of torchvision's data sets, as their authors publish them.
_TRAINING_SAMPLES = {
    "CIFAR10": 50_000,
    "CIFAR100": 50_000,
    "Cityscapes": 2_975,
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
    "VOCSegmentation": 1_464,
}
#: Channels and side of torchvision's images, if they are square and of equal size.
_IMAGES = {
    "CIFAR10": (3, 32),
    "CIFAR100": (3, 32),
    "EMNIST": (1, 28),
    "FER2013": (1, 48),
    "FashionMNIST": (1, 28),
    "KMNIST": (1, 28),
    "MNIST": (1, 28),
    "PCAM": (3, 96),
    "QMNIST": (1, 28),
    "STL10": (3, 96),
    "SVHN": (3, 32),
    "USPS": (1, 16),
}


def channels(data: DataConfig) -> int | None:
    """Return the number of channels of an image; None if it varies."""
    return _IMAGES.get(split_name(data.name)[1], (None, None))[0]


def size(data: DataConfig) -> int | None:
    """Return the side of an image in pixels; None if it varies."""
    return _IMAGES.get(split_name(data.name)[1], (None, None))[1]


def samples(data: DataConfig) -> int | None:
    """Return the number of training samples; None if it is unknown."""
    # An argument may select another part of the data.
    return None if data.args else _TRAINING_SAMPLES.get(split_name(data.name)[1])
