"""The order of samples for a script of the user's own: a function of seed, epoch and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator


class PositionedSampler:
    """Yields one rank's indices of an epoch, from a position on. See ``session.sampler``."""

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
        self._start_epoch, self._start_step = divmod(step, self.steps_per_epoch)
        self._epoch = self._start_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self._num_samples // self._batch

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields; at first that of ``step``."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the first one begins in its middle if ``step`` does."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the indices that this rank still gets in the epoch."""
        return (self.steps_per_epoch - self._skipped()) * (self._batch // self._ranks)

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for step in range(self._skipped(), self.steps_per_epoch):
            yield from order[step * self._batch + self._rank : (step + 1) * self._batch : self._ranks]

    def _skipped(self) -> int:
        return self._start_step if self._epoch == self._start_epoch else 0

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        import torch

        digest = hashlib.sha256(f"{self._seed} {self._epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return [int(index) for index in torch.randperm(self._num_samples, generator=generator)]
