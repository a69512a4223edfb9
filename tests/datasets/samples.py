"""Experiments and small data that the tests of data share."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.batches import TrainingBatches, training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import Batch, DataInfo
from tests.experiments import tiny_experiment

CPU = torch.device("cpu")
AUGMENT = {"hflip": 0.5, "crop_padding": 2, "erasing": 0.3}
TOTAL_STEPS = 7


def experiment(
    *, global_batch_size: int = 8, micro_batch_size: int = 2, seed: int = 0, **data: Any
) -> Experiment:
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    return tiny_experiment(sizes, seed=seed, data={"name": "synthetic", **data})


def random_images(count: int, channels: int = 3, height: int = 12, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def random_split(count: int, channels: int = 3, height: int = 12, width: int = 12) -> TensorSplit:
    return TensorSplit(random_images(count, channels, height, width), torch.arange(count))


def image_file(value: int, form: str = "PNG") -> bytes:
    """Return the file of a small image of one gray value."""
    content = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), value, dtype=np.uint8)).save(content, form)
    return content.getvalue()


def targets_of(split: Any) -> list[Any]:
    return [np.asarray(split.file_content(index)[1]).tolist() for index in range(len(split))]


def source(train: Any, val: Any = None, channels: int = 3) -> DataSource:
    return DataSource(train, val, DataInfo(10, channels, (0.5,) * channels, (0.25,) * channels))


class OneByOne:
    """A split without ``batch``: the same samples by ``__getitem__`` alone."""

    def __init__(self, split: TensorSplit) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        return self._split[index]


class RandomSplit:
    """Draws from every generator in ``__getitem__``, as careless data sets do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        numbers = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.tensor(numbers).view(3, 1, 1).expand(3, 4, 4), index


class BrokenSplit:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        if index == 5:
            raise self._error
        return torch.zeros(3, 4, 4, dtype=torch.uint8), 0

    def path(self, index: int) -> Path:
        return Path(f"folder/{index}.png")


def training(
    train: Any,
    total_steps: int = TOTAL_STEPS,
    *,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    **keys: Any,
) -> TrainingBatches:
    """Return a rank's batches from step ``start`` on; ``keys`` are those of ``experiment``."""
    config = experiment(**keys)
    return training_batches(source(train), config, Position(start), total_steps, rank, world_size, CPU)


def steps(train: Any, **keys: Any) -> list[tuple[int, list[Batch]]]:
    """Return all that ``training`` gives, augmented."""
    with training(train, **{"augment": AUGMENT, **keys}) as batches:
        return list(batches)


def assert_equal(left: list[tuple[int, list[Batch]]], right: list[tuple[int, list[Batch]]]) -> None:
    assert [step for step, _ in left] == [step for step, _ in right]
    for (_, ours), (_, theirs) in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.step, a.number, a.weight) == (b.step, b.number, b.weight)
            assert torch.equal(a.inputs, b.inputs)
            assert torch.equal(a.targets, b.targets)
