"""Experiments and small data that the tests of data share."""

from __future__ import annotations

from typing import Any

import torch

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource, TensorSplit
from hpc_train.runtime.data_info import DataInfo

CPU = torch.device("cpu")


def experiment(
    *, global_batch_size: int = 8, micro_batch_size: int = 2, seed: int = 0, **data: Any
) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "test",
            "seed": seed,
            "task": "classification",
            "model": {"name": "timm/resnet18"},
            "data": {"name": "synthetic", **data},
            "optimization": {
                "steps": 4,
                "global_batch_size": global_batch_size,
                "micro_batch_size": micro_batch_size,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
        }
    )


def random_images(count: int, channels: int = 3, height: int = 12, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def random_split(count: int, channels: int = 3, height: int = 12, width: int = 12) -> TensorSplit:
    return TensorSplit(random_images(count, channels, height, width), torch.arange(count))


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
