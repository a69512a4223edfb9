"""The samples of each rank and step, from any step on and for any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any


class PositionedSampler:
    """Yields one rank's indices of an epoch, from a position on. See ``session.sampler``.

    Its state is the step that ``save_state`` saves, since a loader reads samples ahead.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        rank: int,
        ranks: int,
        *,
        step: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if global_batch_size % ranks:
            raise ValueError(f"global_batch_size {global_batch_size} is not a multiple of {ranks} ranks")
        if num_samples < global_batch_size:
            raise ValueError(f"{num_samples} samples are fewer than global_batch_size {global_batch_size}")
        self._num_samples, self._batch = num_samples, global_batch_size
        self._rank, self._ranks, self._seed, self._shuffle = rank, ranks, seed, shuffle
        #: Called when the first pass begins in the middle of its epoch.
        self.on_resume: Callable[[], None] = lambda: None
        self.start_at(step)

    def start_at(self, step: int) -> None:
        """Begin the next pass at this step."""
        self._start_epoch, self._start_step = divmod(step, self.steps_per_epoch)
        self._epoch = self._start_epoch

    def facts(self) -> dict[str, Any]:
        """Return the properties by which a step determines its samples."""
        return {
            "samples": self._num_samples,
            "global_batch_size": self._batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self._num_samples // self._batch

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: at first that of ``step``, then one more after each pass."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the first one begins in its middle if ``step`` does."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the indices that this rank still gets in the epoch."""
        return (self.steps_per_epoch - self._skipped()) * (self._batch // self._ranks)

    def __iter__(self) -> Iterator[int]:
        order, first = self._order(), self._skipped()
        if first:
            self.on_resume()
        epoch = self._epoch
        for step in range(first, self.steps_per_epoch):
            yield from order[step * self._batch + self._rank : (step + 1) * self._batch : self._ranks]
        self._start_step, self._epoch = 0, epoch + 1

    def _skipped(self) -> int:
        return self._start_step if self._epoch == self._start_epoch else 0

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        import torch

        digest = hashlib.sha256(f"{self._seed} {self._epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return [int(index) for index in torch.randperm(self._num_samples, generator=generator)]
