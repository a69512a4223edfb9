"""The samples that each rank reads, in order: a pure function of (seed, position, rank, ranks).

Called by ``batches``. One worked example: N = 10 samples, G = 8, m = 2, so M = 4 micro-batches and E = 1 step
per epoch; R = 3 ranks. Step 0 is window 0: the first 8 indices of epoch 0's permutation p. Each rank has
⌈4/3⌉ = 2 slots:

    rank 0: micro-batch 0 = p[0:2], micro-batch 3 = p[6:8]
    rank 1: micro-batch 1 = p[2:4], then spare: micro-batch 1 again, weight 0
    rank 2: micro-batch 2 = p[4:6], then spare: micro-batch 2 again, weight 0

With K = 2 repeats (arXiv:1902.05509) step 0 reads the first G / K = 4 indices, each twice in succession. They
are dealt to the micro-batches as timm's RepeatAugSampler deals them to ranks: micro-batch i receives every
M-th, starting at the i-th, so that the repeats of a sample are in different micro-batches. With (index,
repeat):

    micro-batch 0 = (p[0], 0) (p[2], 0)    micro-batch 1 = (p[0], 1) (p[2], 1)
    micro-batch 2 = (p[1], 0) (p[3], 0)    micro-batch 3 = (p[1], 1) (p[3], 1)

Legend: N samples, G global batch, m micro-batch, M = G / m micro-batches per step, R ranks, S = ⌈M/R⌉ slots
per rank and step, E = ⌊N/G⌋ windows per epoch, K repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from hpc_train.experiment.topology import batch_arithmetic
from hpc_train.training.datasets.random_numbers import hash_words


@dataclass(frozen=True)
class Position:
    """The position of training: ``step`` steps are done and the windows ``skipped`` are skipped.

    ``skipped`` is sorted and has no duplicates.
    """

    step: int
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.step >= 0
        assert list(self.skipped) == sorted(set(self.skipped)), f"not sorted or not unique: {self.skipped}"

    def windows(self) -> Iterator[int]:
        """Yield the window of step ``step``, then the windows of the following steps, without end."""
        window = self.step
        for skipped in self.skipped:
            window += skipped <= window
        skipped_windows = set(self.skipped)
        while True:
            if window not in skipped_windows:
                yield window
            window += 1


@dataclass(frozen=True)
class Slot:
    """One micro-batch to read: yielded by a sampler and sent to a loader process.

    ``step`` counts from 0, ``number`` is the micro-batch's index in the step (or in the evaluation),
    ``indices`` (m,) int64. The first ``num_valid`` of them count, the rest is padding. ``repeats``: how often
    the step has read each sample before, (m,) int64; 0: no sample is repeated.
    """

    step: int
    window: int
    epoch: int
    number: int
    weight: float
    indices: Tensor
    num_valid: int
    repeats: int | Tensor = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A tensor would be sent as shared memory: one file descriptor each, and here a view of a whole epoch.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in values.items() if name not in tensors}
        return _unpickle_slot, (plain, {name: value.numpy().tobytes() for name, value in tensors.items()})


def _unpickle_slot(values: dict[str, Any], tensors: dict[str, bytes]) -> Slot:
    read = {
        name: torch.from_numpy(np.frombuffer(content, np.int64).copy()) for name, content in tensors.items()
    }
    return Slot(**values | read)


class MicroBatchSampler(DistributedSampler[Slot]):
    """Yields this rank's slots, step by step, from ``position`` to ``total_steps``, over epochs.

    For ``DataLoader(batch_sampler=…)``. ``set_epoch`` is not needed and has no effect, because the position
    determines the epoch. Raises BadFileError if a global batch does not fit the data or the ranks.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        repeats: int = 1,
        position: Position,
        total_steps: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_sizes(num_samples, global_batch_size, micro_batch_size, repeats, world_size)
        # The base class only needs the length of its data set, so a range replaces the data.
        super().__init__(
            cast(Any, range(num_samples)), num_replicas=world_size, rank=rank, shuffle=True, seed=seed
        )
        self._count = num_samples
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._repeats = repeats
        self._position = position
        self._total_steps = total_steps
        self._cached: tuple[int, Tensor] | None = None

    @property
    def micro_batches(self) -> int:
        """M."""
        return self._global_batch_size // self._micro_batch_size

    @property
    def slots_per_step(self) -> int:
        """S."""
        return math.ceil(self.micro_batches / self.num_replicas)

    def __len__(self) -> int:
        return max(0, self._total_steps - self._position.step) * self.slots_per_step

    def __iter__(self) -> Iterator[Slot]:
        steps = range(self._position.step, self._total_steps)
        num_slots = self.slots_per_step
        for step, window in zip(steps, self._position.windows(), strict=False):
            for place in range(num_slots):
                yield self._slot(step, window, place, self.rank)

    def of_rank(self, rank: int, step: int) -> list[Slot]:
        """Return the slots of any rank in any step from the position on."""
        window = next(Position(step, self._position.skipped).windows())
        return [self._slot(step, window, place, rank) for place in range(self.slots_per_step)]

    def samples(self, step: int) -> list[int]:
        """Return the indices that all ranks read for a step, by micro-batch, each micro-batch once."""
        slots = [slot for rank in range(self.num_replicas) for slot in self.of_rank(rank, step)]
        counted = sorted((slot for slot in slots if slot.weight > 0), key=lambda slot: slot.number)
        return [index for slot in counted for index in slot.indices.tolist()]

    def _slot(self, step: int, window: int, place: int, rank: int) -> Slot:
        micro_batches = self.micro_batches
        number, weight = rank + place * self.num_replicas, 1 / micro_batches
        if number >= micro_batches:  # spare: only takes part in the collectives
            number, weight = rank, 0.0
        size = self._micro_batch_size
        epoch, slice_number = divmod(window, self._count // self._global_batch_size)
        if self._repeats > 1:
            dealt = torch.arange(number, self._global_batch_size, self.micro_batches)
            first = slice_number * (self._global_batch_size // self._repeats)
            places, repeats = first + dealt // self._repeats, dealt % self._repeats
            indices = self._permutation(epoch)[places]
            return Slot(step, window, epoch, number, weight, indices, num_valid=size, repeats=repeats)
        start = slice_number * self._global_batch_size + number * size
        indices = self._permutation(epoch)[start : start + size]
        return Slot(step, window, epoch, number, weight, indices, num_valid=size)

    def _permutation(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(hash_words(self.seed, epoch) >> 1)
            self._cached = epoch, torch.randperm(self._count, generator=generator)
        return self._cached[1]


def _check_sizes(
    num_samples: int, global_batch_size: int, micro_batch_size: int, repeats: int, world_size: int
) -> None:
    for problem in (
        batch_arithmetic.too_few_samples(global_batch_size, micro_batch_size, num_samples),
        batch_arithmetic.undivided_batch(global_batch_size, micro_batch_size),
        batch_arithmetic.undivided_repeats(global_batch_size, repeats),
        batch_arithmetic.too_few_micro_batches(global_batch_size // micro_batch_size, world_size),
    ):
        if problem is not None:
            raise problem.as_error()


class EvaluationSampler(Sampler[Slot]):
    """Yields batches of m samples in index order: rank r reads r, r + R, …; the same number on all ranks.

    Padding of the last batches repeats sample 0 and is not valid, so sums over valid samples count each
    sample exactly once.
    """

    def __init__(self, num_samples: int, micro_batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self._count = num_samples
        self._size = micro_batch_size
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return math.ceil(math.ceil(self._count / self._size) / self._world_size)

    def __iter__(self) -> Iterator[Slot]:
        for place in range(len(self)):
            number = self._rank + place * self._world_size
            indices = torch.arange(number * self._size, (number + 1) * self._size)
            valid = indices < self._count
            yield Slot(0, 0, 0, number, 1.0, indices * valid, num_valid=int(valid.sum()))
