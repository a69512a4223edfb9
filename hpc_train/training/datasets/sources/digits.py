"""``digits``: scikit-learn's 1,797 scanned digits, included in the package, so nothing is downloaded.

``digits.npz`` contains the data of ``sklearn.datasets.load_digits``: images (1797, 8, 8) uint8 in 0…16 and
classes (1797,) uint8.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.image_facts import DigitsArgs
from hpc_train.training.datasets.base import DataSource, TensorSplit, parse_args, refuse_rest
from hpc_train.training.datasets.types import DataInfo

_MAX_VALUE = 16
#: 8x8 pixels are scaled to 32x32, so that models for CIFAR accept them.
_ENLARGED = 4
#: Every fifth sample is validation, so the split does not depend on any library's shuffling.
_VAL_EVERY = 5
#: Measured on the training split.
_MEAN, _STD = 0.30586, 0.37628


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return 1,438 training and 359 validation images of 1x32x32."""
    refuse_rest(config)
    args = parse_args(DigitsArgs, config)
    images, classes = _load()
    images = images.expand(-1, args.channels, -1, -1)
    is_val = torch.arange(len(images)) % _VAL_EVERY == _VAL_EVERY - 1
    info = DataInfo(
        num_classes=10,
        channels=args.channels,
        mean=(_MEAN,) * args.channels,
        std=(_STD,) * args.channels,
        class_names=tuple("0123456789"),
    )
    train = TensorSplit(images[~is_val], classes[~is_val])
    return DataSource(train, TensorSplit(images[is_val], classes[is_val]), info)


def _load() -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 32, 32) uint8 in 0…255 and classes (1797,) int64."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        small, classes = arrays["images"], arrays["classes"]
    scaled = np.round(small.astype(np.float64) * 255 / _MAX_VALUE).astype(np.uint8)
    enlarged = scaled.repeat(_ENLARGED, axis=1).repeat(_ENLARGED, axis=2)
    return torch.from_numpy(enlarged)[:, None], torch.from_numpy(classes.astype(np.int64))
