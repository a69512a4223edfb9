# ruff: noqa: N806  (shape suffixes)
"""``synthetic``: reproducible images generated on the fly that a model can learn to classify.

An image is the mean of its class's coarse pattern and of the sample's noise. Nothing is stored, so a million
images need no memory.

Legend: B images, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.image_facts import SyntheticArgs
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest
from hpc_train.training.datasets.random_numbers import Keys
from hpc_train.training.datasets.types import DataInfo

#: Side of the grid of a class's pattern.
_COARSE = 4
#: Validation has a fifth as many samples as training; training uses none of them.
_VAL_PART = 5
_TRAIN, _VAL, _PATTERNS = 0, 1, 2
#: The mean of two numbers uniform over 0…1 has a standard deviation of √(1/24).
_MEAN, _STD = 0.5, 0.204


class SyntheticSplit:
    """``count`` images, generated on request."""

    def __init__(self, args: SyntheticArgs, count: int, part: int) -> None:
        self._count = count
        self._part = part
        self._num_classes = args.num_classes
        self._shape = (args.channels, args.image_size, args.image_size)
        self._coarse_KCHW = _random_bytes(
            _PATTERNS, torch.arange(args.num_classes), (args.channels, _COARSE, _COARSE)
        )
        self._cells = torch.arange(args.image_size) * _COARSE // args.image_size

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8 and classes (B,) int64."""
        classes_B = indices % self._num_classes
        pattern_BCHW = self._coarse_KCHW[classes_B][:, :, self._cells][:, :, :, self._cells]
        noise_BCHW = _random_bytes(self._part, indices, self._shape)
        # The mean without overflow: common bits, plus half of the differing bits.
        return (pattern_BCHW & noise_BCHW) + ((pattern_BCHW ^ noise_BCHW) >> 1), classes_B


def _random_bytes(part: int, indices: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return (B, *shape) uint8, eight from each 64-bit number."""
    channels, height, width = shape
    num_bytes = channels * height * width
    numbers = Keys(0, part, indices).words_many("pixels", -(-num_bytes // 8))
    return numbers.view(torch.uint8)[:, :num_bytes].reshape(-1, *shape)


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return ``num_samples`` training images and a fifth as many for validation, at least one."""
    refuse_rest(config)
    args = parse_args(SyntheticArgs, config)
    info = DataInfo(args.num_classes, args.channels, (_MEAN,) * args.channels, (_STD,) * args.channels)
    val_count = max(1, args.num_samples // _VAL_PART)
    return DataSource(
        SyntheticSplit(args, args.num_samples, _TRAIN), SyntheticSplit(args, val_count, _VAL), info
    )
