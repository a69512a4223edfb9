"""Digests of the training state: of each tensor, and of parts of the model (``checkpoint.digests: parts``).

A digest is that of the tensors' bytes on the host, so that those of a run, of its checkpoints and of replays
are comparable without torch; a step with digests waits for the device. Every rank computes them of its own
pieces, copies under DDP included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from hpc_train.run.digests import MAX_PART_STEPS, MAX_PARTS, DigestWriter, PartDigest, part_digests, part_id
from hpc_train.training.checkpoint.staging import Contents
from hpc_train.training.strategies.pieces import local_part
from hpc_train.training.train_state import TrainState

#: Steps between two digests of the state, if ``checkpoint.parts_every`` is not given. Assumed.
PARTS_EVERY = 32
#: Part of the time of training that the digests may take.
MAX_SHARE = 0.005
_ALL = (1 << 64) - 1


class PartDigests:
    """Computes the digests of one rank's state by part. ``writer``: on rank 0 only.

    Every ``every`` steps; None: every ``PARTS_EVERY``, doubled until they take at most ``MAX_SHARE`` of the
    time. Doubled in either case if a run of ``total_steps`` would have more than ``MAX_PART_STEPS`` of them.
    """

    def __init__(
        self,
        state: TrainState,
        writer: DigestWriter[PartDigest] | None,
        attempt: int,
        every: int | None,
        total_steps: int,
    ) -> None:
        self._state, self._writer, self._attempt = state, writer, attempt
        self._adapts = every is None
        self.every = every or PARTS_EVERY
        while total_steps > self.every * MAX_PART_STEPS:
            self.every *= 2
        #: How often this rank would double ``every``.
        self._doublings = 0
        #: Step and time at which the newest digests were complete.
        self._since: tuple[int, float] | None = None

    def step_done(self, step: int, loss: Tensor) -> None:
        """Write the digests if they are due after ``step`` completed steps. Collective.

        ``loss``: any tensor on the device.
        """
        if step % self.every:
            self._since = self._since or (step, time.perf_counter())
            return
        (loss + 0).item()  # waits for the steps so far, whose time is not that of the digests
        began = time.perf_counter()
        self._exchange(step, loss.device)
        ended = time.perf_counter()
        if self._adapts and self._since is not None:
            step_s = (began - self._since[1]) / (step - self._since[0])
            share = (ended - began) / (step_s * self.every)
            self._doublings = math.ceil(math.log2(max(share, MAX_SHARE) / MAX_SHARE))
        self._since = step, ended

    def _exchange(self, step: int, device: torch.device) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tensors = tensor_digests(self._state)
        table = torch.zeros(MAX_PARTS + 1, 3, dtype=torch.int64)
        table[0, 0] = self._doublings
        for row, (part, digests) in enumerate(part_digests(tensors, rank).items(), start=1):
            table[row] = torch.tensor([_signed(number) for number in (part_id(part), *digests)])
        tables = [table]
        if world_size > 1:
            tables = [torch.empty_like(table, device=device) for _ in range(world_size)]
            dist.all_gather(tables, table.to(device))
        sums: dict[int, tuple[int, int]] = {}
        doublings = 0
        for (doubling, _, _), *rows in (of_rank.tolist() for of_rank in tables):
            doublings = max(doublings, doubling)
            for part, weights, optimizer in (row for row in rows if row[0]):
                before = sums.get(part & _ALL, (0, 0))
                sums[part & _ALL] = (before[0] + weights) & _ALL, (before[1] + optimizer) & _ALL
        self.every <<= doublings
        if self._writer is not None:
            records = sorted(sums.items())
            self._writer.append(
                [PartDigest(step, part, *digests, self._attempt, world_size) for part, digests in records]
            )

    def sync(self) -> None:
        """Sync the written digests to the disk. Any thread."""
        if self._writer is not None:
            self._writer.sync()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def tensor_digests(state: TrainState) -> dict[str, str]:
    """Return the digest of each tensor of the state, of this rank's pieces."""
    pieces = Contents.of(state.state, state.strategy, {}).pieces
    return {name: tensor_digest(piece.local for piece in parts) for name, parts in pieces.items()}


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """Return the digest of the bytes of tensors: that of ``run.digests.shard_digests`` for a saved tensor."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        strided = tensor.to_dense() if tensor.is_sparse else local_part(tensor)
        plain = strided.detach().cpu().contiguous()
        if plain.numel():
            # A single element may have any stride.
            digest.update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()
