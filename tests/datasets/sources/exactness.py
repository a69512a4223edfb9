"""What each data source must give: the same batches after a resume, and on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import Batch
from tests.datasets.samples import CPU, experiment

_STEPS = 5
Pixels = tuple[torch.Tensor, torch.Tensor]


def assert_exact(build: Callable[[], DataSource], **data: Any) -> None:
    """Compare a resume in mid-epoch, loader processes, two ranks, and evaluation on one to three ranks.

    ``build`` opens the data again, as a new process does.
    """
    config = experiment(
        global_batch_size=8, micro_batch_size=2, **{"augment": {"hflip": 0.5, "crop_padding": 1}, **data}
    )
    reference = dict(_training(build(), config, 0, 1))
    assert len(reference) == _STEPS * 4
    assert_same(dict(_training(build(), config, 0, 1, start=3)), reference, 2 * 4)
    with_workers = config.model_copy(update={"data": config.data.model_copy(update={"workers": 1})})
    both = [pair for rank in range(2) for pair in _training(build(), with_workers, rank, 2)]
    assert_same(dict(both), reference, len(reference))
    val = build().val
    assert val is not None
    expected = dict(_valid(evaluation_batches(val, config, 0, 1, CPU)))
    assert len(expected) == len(val)
    for world_size in (2, 3):
        found: dict[int, Pixels] = {}
        for rank in range(world_size):
            found |= dict(_valid(evaluation_batches(val, config, rank, world_size, CPU)))
        assert_same(found, expected, len(val))


def assert_same(found: dict[Any, Pixels], expected: dict[Any, Pixels], count: int) -> None:
    assert len(found) == count
    for key, (inputs, targets) in found.items():
        assert torch.equal(inputs, expected[key][0]) and torch.equal(targets, expected[key][1])


def _training(
    source: DataSource, config: Any, rank: int, world_size: int, start: int = 0
) -> Iterator[tuple[tuple[int, int], Pixels]]:
    with training_batches(source, config, Position(start), _STEPS, rank, world_size, CPU) as batches:
        for step, micro_batches in batches:
            for batch in micro_batches:
                yield (step, batch.number), _pair(batch)


def _valid(batches: Any) -> Iterator[tuple[int, Pixels]]:
    for batch in batches:
        inputs, targets = _pair(batch)
        for place in batch.valid.nonzero()[:, 0].tolist():
            yield 2 * batch.number + place, (inputs[place], targets[place])


def _pair(batch: Batch) -> Pixels:
    assert isinstance(batch.inputs, torch.Tensor) and isinstance(batch.targets, torch.Tensor)
    return batch.inputs, batch.targets
