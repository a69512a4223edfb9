"""Digests of training steps: ``checkpoint.digests``.

Every rank has one ``StepDigests``, an observer of its steps; rank 0 writes ``digests.bin``. A step only keeps
its numbers on the device. Every ``EVERY_STEPS`` steps, and before a save, they are exchanged in one reduction
whose result is read when it has arrived, so no step waits for the device.

The samples of a step are the sum, modulo 2^64, of a hash of each micro-batch's number and indices: it does
not depend on the ranks that read them. Losses are gathered by rank and added up in the order of the ranks:
the order in which a reduction adds depends on its algorithm and on the length of its tensor.

Legend: R ranks, K steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from typing_extensions import override

from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.digests import DigestsFile, StepDigest
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.step import StepObserver, StepResult

#: Steps between two exchanges (assumed: an exchange costs about as much as a row of metrics).
EVERY_STEPS = 32
_LOW = (1 << 32) - 1


@dataclass
class _Step:
    step: int
    samples: int
    loss: Tensor
    grad_norm: Tensor | None


@dataclass
class _Exchanged:
    """Numbers of K steps that are still being copied from the device."""

    steps: list[int]
    #: Low and high half of the samples' digest, then the bits of each rank's loss, (K, 2 + R) int64; and the
    #: norms, float64, one for each step that has one.
    table_and_norms: HostCopy
    has_norm: list[bool]

    def digests(self, attempt: int) -> list[StepDigest]:
        table, norms = self.table_and_norms.tensors()
        losses = torch.zeros(len(self.steps), dtype=torch.float64)
        for of_rank in table[:, 2:].contiguous().view(torch.float64).unbind(1):
            losses += of_rank
        each_norm = iter(norms.tolist())
        halves = table[:, :2].tolist()
        return [
            StepDigest(
                step,
                (low + (high << 32)) & ((1 << 64) - 1),
                loss,
                next(each_norm) if has_norm else None,
                attempt,
            )
            for step, (low, high), loss, has_norm in zip(
                self.steps, halves, losses.tolist(), self.has_norm, strict=True
            )
        ]


def digests_file(config: Experiment, device: torch.device, paths: RunPaths, step: int) -> DigestsFile | None:
    """Return the run's file for the steps after ``step``; None if the file of the experiment has no digests.

    Digests of later steps, which an earlier attempt wrote, are withdrawn in either case.
    """
    has_digests = digests_mode(config, device) != "off"
    if not has_digests and not paths.digests.exists():
        return None
    file = DigestsFile(paths.digests, step)
    return file if has_digests else None


def digests_mode(config: Experiment, device: torch.device) -> str:
    """Return ``checkpoint.digests``, or its default on this device; the same on all ranks."""
    if config.checkpoint.digests is not None:
        return config.checkpoint.digests
    is_exact = device.type == "cpu" if config.deterministic is None else config.deterministic
    return "steps" if is_exact else "off"


def samples_digest(batches: Sequence[Batch]) -> int:
    """Return the digest of the indices that a rank has read for a step; spare slots do not count."""
    total = 0
    for batch in batches:
        if batch.weight > 0:
            total += xxhash.xxh3_64_intdigest(batch.samples, seed=batch.number)
    return total & ((1 << 64) - 1)


class DigestWriter(Protocol):
    """Receives the digests of all ranks: ``run.digests.DigestsFile``."""

    def append(self, digests: list[StepDigest]) -> None:
        """Write the digests of consecutive steps."""

    def sync(self) -> None:
        """Sync the written digests to the disk. Any thread."""


class StepDigests(StepObserver):
    """Collects the digests of one rank's steps. ``writer``: on rank 0 only.

    ``owns_loss``: of this rank's strategy; a rank without it contributes nothing.
    """

    def __init__(
        self,
        writer: DigestWriter | None,
        attempt: int,
        *,
        owns_loss: bool,
        every_steps: int = EVERY_STEPS,
    ) -> None:
        self._writer = writer
        self._attempt = attempt
        self._owns_loss = owns_loss
        self._every_steps = every_steps
        self._steps: list[_Step] = []
        self._exchanged: deque[_Exchanged] = deque()

    @override
    def step_done(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        samples = samples_digest(batches) if self._owns_loss else 0
        self._steps.append(_Step(step + 1, samples, result.loss, result.grad_norm))
        if (step + 1) % self._every_steps == 0:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the numbers of the steps since the last exchange. Collective; does not wait for them."""
        steps, self._steps = self._steps, []
        if steps:
            self._exchange(steps)
        self.drain(wait=False)

    def _exchange(self, steps: list[_Step]) -> None:
        device, world_size = steps[0].loss.device, dist.get_world_size()
        host = torch.zeros(len(steps), 2 + world_size, dtype=torch.int64, pin_memory=device.type == "cuda")
        host[:, :2] = torch.tensor([[step.samples & _LOW, step.samples >> 32] for step in steps])
        table = host.to(device, non_blocking=True)
        if self._owns_loss:
            losses = torch.stack([step.loss for step in steps]).to(torch.float64)
            table[:, 2 + dist.get_rank()] = losses.view(torch.int64)
        if world_size > 1:
            dist.all_reduce(table)
        if self._writer is None:
            return
        with_norm = [step.grad_norm for step in steps if step.grad_norm is not None]
        norms = (torch.stack(with_norm) if with_norm else torch.zeros(0, device=device)).to(torch.float64)
        has_norm = [step.grad_norm is not None for step in steps]
        numbers = [step.step for step in steps]
        self._exchanged.append(_Exchanged(numbers, HostCopy(table, norms), has_norm))

    def drain(self, *, wait: bool) -> None:
        """Write the digests whose numbers have arrived, or wait for all that were exchanged."""
        while self._exchanged and (wait or self._exchanged[0].table_and_norms.is_ready):
            assert self._writer is not None
            self._writer.append(self._exchanged.popleft().digests(self._attempt))

    def sync(self) -> None:
        """Sync the written digests to the disk. Any thread."""
        if self._writer is not None:
            self._writer.sync()
