"""The batches of training and evaluation, as CPU tensors. The loop and evaluation call these.

Legend: m micro-batch, M micro-batches of a step, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from hpc_train.config.schema import DataConfig, Experiment
from hpc_train.datasets.augment import Augmentation
from hpc_train.datasets.base import DataSource, Split
from hpc_train.datasets.images import centre_square, stack
from hpc_train.datasets.reading import Prepare, SlotReader
from hpc_train.datasets.sampler import EvaluationSampler, MicroBatchSampler, Position, Slot
from hpc_train.datasets.workers import BatchStream
from hpc_train.runtime.data_info import Batch


class TrainingBatches(Iterator[tuple[int, list[Batch]]]):
    """Yields (step, this rank's micro-batches of it); steps count from 0, the position's first.

    ``close`` ends the loader processes early; a ``with`` block does so too.
    """

    def __init__(self, stream: BatchStream, sampler: MicroBatchSampler) -> None:
        self._stream = stream
        self._slots_per_step = sampler.slots_per_step

    def __next__(self) -> tuple[int, list[Batch]]:
        first = next(self._stream)
        return first.step, [first, *(next(self._stream) for _ in range(self._slots_per_step - 1))]

    @property
    def worker_pids(self) -> list[int]:
        return self._stream.worker_pids

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def training_batches(
    source: DataSource,
    experiment: Experiment,
    position: Position,
    total_steps: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> TrainingBatches:
    """Return this rank's steps from ``position`` to ``total_steps``; loader processes start at once.

    Batches are on the CPU, pinned where ``device`` is CUDA; uint8, not normalised, unless the data are float.
    """
    data, seed = experiment.data, experiment.seed
    sampler = MicroBatchSampler(
        len(source.train),
        global_batch_size=experiment.optimization.global_batch_size,
        micro_batch_size=_micro_batch_size(experiment),
        seed=seed,
        position=position,
        total_steps=total_steps,
        rank=rank,
        world_size=world_size,
    )
    augmentation = Augmentation(data.augment, data.image_size, seed)

    def prepare(images: Tensor | Sequence[Tensor], slot: Slot) -> Tensor:
        return augmentation(images, slot.epoch, slot.indices)

    reader = SlotReader(source.train, source.info.channels, seed, prepare)
    return TrainingBatches(BatchStream(reader, sampler, workers=data.workers, device=device), sampler)


class EvaluationBatches:
    """This rank's share of a split, from its start at each ``iter``; loader processes live for one pass."""

    def __init__(
        self, reader: SlotReader, sampler: EvaluationSampler, workers: int, device: torch.device
    ) -> None:
        self._reader = reader
        self._sampler = sampler
        self._workers = workers
        self._device = device

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        workers = min(self._workers, len(self))
        stream = BatchStream(self._reader, self._sampler, workers=workers, device=self._device)
        try:
            yield from stream
        finally:
            stream.close()


def evaluation_batches(
    split: Split, experiment: Experiment, rank: int, world_size: int, device: torch.device
) -> EvaluationBatches:
    """Return this rank's batches of ``split``, equally many on every rank, each of exactly m samples.

    Each sample is valid in exactly one batch of one rank. ``step`` is 0, ``weight`` 1 and ``number`` the
    batch's place in the whole evaluation.
    """
    reader = SlotReader(split, None, experiment.seed, _evaluation_prepare(experiment.data))
    sampler = EvaluationSampler(len(split), _micro_batch_size(experiment), rank, world_size)
    return EvaluationBatches(reader, sampler, experiment.data.workers, device)


def evaluation_batch_count(split: Split, micro_batch_size: int) -> int:
    """Return how many batches the whole evaluation has, over all ranks, without those that only fill up."""
    return math.ceil(len(split) / micro_batch_size)


def _micro_batch_size(experiment: Experiment) -> int:
    size = experiment.optimization.micro_batch_size
    assert isinstance(size, int), "micro_batch_size: auto is resolved before it is used"
    return size


def _evaluation_prepare(data: DataConfig) -> Prepare:
    size, kept = data.image_size, data.eval_crop

    def prepare(images: Tensor | Sequence[Tensor], slot: Slot) -> Tensor:
        if size is not None:
            return stack([centre_square(image, size, kept) for image in images])
        return images if isinstance(images, Tensor) else stack(images)

    return prepare
