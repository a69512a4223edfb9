"""Slots → batches: reads a slot's samples of a split and prepares them. Runs in the loader's workers.

Legend: B samples.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from hpc_train.datasets.base import ArraySplit, Split
from hpc_train.datasets.images import as_tensor, sample_path
from hpc_train.datasets.random_numbers import hash_words
from hpc_train.datasets.sampler import Slot
from hpc_train.errors import BadFileError
from hpc_train.runtime.data_info import Batch

#: Images (B, C, H, W) or B of (C, H, W), and their slot → (B, C, H, W).
Prepare = Callable[[Tensor | Sequence[Tensor], Slot], Tensor]


@dataclass(frozen=True)
class Failure:
    """What a worker returns in place of a batch; raised as BadFileError by the rank.

    An exception that crosses the loader loses its type's fields and gains a worker's traceback.
    """

    message: str


class SlotReader(Dataset[Batch]):
    """A split as a loader's data set: it is indexed by slots."""

    def __init__(self, split: Split, channels: int | None, seed: int, prepare: Prepare) -> None:
        self._split = split
        self._channels = channels
        self._seed = seed
        self._prepare = prepare

    def __getitems__(self, slot: Slot) -> Batch | Failure:
        """Return the slot's batch; what a user can mend comes back as a Failure, not as an exception."""
        try:
            images, targets = self._read(slot)
            inputs = self._prepare(images, slot)
        except BadFileError as error:
            return Failure(str(error))
        valid = torch.arange(len(slot.indices)) < slot.num_valid
        return Batch(slot.step, slot.number, slot.weight, inputs, targets, valid)

    def _read(self, slot: Slot) -> tuple[Tensor | list[Tensor], Tensor]:
        if isinstance(self._split, ArraySplit):
            return self._split.batch(slot.indices)
        with _own_generators():
            samples = [self._sample(slot.epoch, index) for index in slot.indices.tolist()]
        images, targets = zip(*samples, strict=True)
        return list(images), torch.tensor(targets)

    def _sample(self, epoch: int, index: int) -> tuple[Tensor, int]:
        seed_generators(hash_words(self._seed, epoch, index))
        try:
            image, target = self._split[index]
            return as_tensor(image, self._channels), int(target)
        except Exception as error:
            path = sample_path(self._split, index)
            name = f"sample {index}" if path is None else f"sample {index} ({path})"
            raise BadFileError(f"data: {name} can't be read: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    if isinstance(error, BadFileError):
        return str(error).removeprefix("data: ")
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, (OSError, SyntaxError)):  # the file's fault: Pillow raises both
        return words
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{words} (at {place.filename}:{place.lineno})"


def seed_generators(seed: int) -> None:
    """Seed what a plug-in's ``__getitem__`` may draw from: Python's, NumPy's and torch's CPU stream."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leave the generators as they were, in the rank itself; a worker's belong to nobody else."""
    if get_worker_info() is not None:
        yield
        return
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def unchanged(batch: Any) -> Any:
    """Collate for loaders whose data set returns whole batches."""
    return batch
