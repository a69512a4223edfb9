"""Mean and standard deviation per channel of widely used data sets, for images scaled to 0…1."""

from __future__ import annotations

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
#: Of ImageNet in gray, with the weights of luminance.
_GRAY_MEAN, _GRAY_STD = (0.459,), (0.226,)

_BY_NAME = {
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "MNIST": ((0.1307,), (0.3081,)),
    "FashionMNIST": ((0.2860,), (0.3530,)),
    "KMNIST": ((0.1918,), (0.3483,)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}


def mean_and_std(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the statistics of the data set ``name``, or ImageNet's; 0.5 and 0.25 for other than 1 or 3
    channels.
    """
    known = _BY_NAME.get(name)
    if known is not None and len(known[0]) == channels:
        return known
    if channels == 3:
        return _IMAGENET_MEAN, _IMAGENET_STD
    if channels == 1:
        return _GRAY_MEAN, _GRAY_STD
    return (0.5,) * channels, (0.25,) * channels
