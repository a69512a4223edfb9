"""Micro-batches by number: the same for whoever trains on them, from no data set and no disk."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.training.datasets.types import Batch, DataInfo
from tests.forwards import dealt
from tests.parallelism.cases import MICRO_BATCH_SIZE

NUM_CLASSES = 4
INFO = DataInfo(num_classes=NUM_CLASSES, channels=1, mean=(0.0,), std=(1.0,))


def micro_batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return images (B, 1, 16, 16) float64 and classes (B,) of a step's micro-batch ``number``."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    classes = torch.randint(NUM_CLASSES, (MICRO_BATCH_SIZE,), generator=generator)
    noise = torch.randn(MICRO_BATCH_SIZE, 1, 16, 16, generator=generator, dtype=torch.float64)
    # A class shows, so that losses fall and a wrong step is seen in the next loss.
    return noise + classes[:, None, None, None] - 1.5, classes


def batch(step: int, number: int, weight: float, dtype: torch.dtype) -> Batch:
    images, classes = micro_batch(step, number)
    valid = torch.ones(MICRO_BATCH_SIZE, dtype=torch.bool)
    return Batch(step, number, weight, images.to(dtype), classes, valid)


def slots(step: int, rank: int, ranks: int, micro_batches: int, dtype: torch.dtype) -> list[Batch]:
    return dealt(lambda number, weight: batch(step, number, weight, dtype), micro_batches, rank, ranks)
