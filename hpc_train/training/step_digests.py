"""Digests of training steps: ``checkpoint.digests``.

Every rank has one ``StepDigests``, an observer of its steps; rank 0 writes ``digests.bin``. A step only keeps
its numbers on the device. Every ``EVERY_STEPS`` steps, and before a save, they are exchanged in one reduction
whose result is read when it has arrived, so no step waits for the device.

The samples of a step are the sum, modulo 2^64, of a hash of each micro-batch's number and indices: it does
not depend on the ranks that read them. Losses are gathered by rank and added up in the order of the ranks:
the order in which a reduction adds depends on its algorithm and on the length of its tensor.

With ``digests: parts`` there are also those of ``state_digests``, for which a step waits.
``TensorDigests`` computes digests of all tensors, for replays alone.

Legend: R ranks, K steps.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from typing_extensions import override

from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.digests import DigestsFile, DigestWriter, PartDigest, RecordsFile, StepDigest
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.module_watch import ModuleWatch, floating_tensors
from hpc_train.training.state_digests import PartDigests, tensor_digest, tensor_digests
from hpc_train.training.step import StepObserver, StepResult
from hpc_train.training.train_state import TrainState

#: Steps between two exchanges (assumed: an exchange costs about as much as a row of metrics).
EVERY_STEPS = 32
_LOW, _ALL = (1 << 32) - 1, (1 << 64) - 1


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
                (low + (high << 32)) & _ALL,
                loss,
                next(each_norm) if has_norm else None,
                attempt,
            )
            for step, (low, high), loss, has_norm in zip(
                self.steps, halves, losses.tolist(), self.has_norm, strict=True
            )
        ]


@dataclass(frozen=True)
class DigestFiles:
    """The files of a run's digests, which rank 0 writes."""

    steps: DigestsFile
    parts: RecordsFile[PartDigest] | None

    def close(self) -> None:
        """Close the files without syncing them."""
        self.steps.close()
        if self.parts is not None:
            self.parts.close()


def digest_files(config: Experiment, device: torch.device, paths: RunPaths, step: int) -> DigestFiles | None:
    """Return the run's files for the steps after ``step``; None if the file of the experiment has no digests.

    Digests of later steps, which an earlier attempt wrote, are withdrawn in either case.
    """
    mode = digests_mode(config, device)
    steps = DigestsFile(paths.digests, step) if mode != "off" or paths.digests.exists() else None
    has_parts = mode == "parts" or paths.part_digests.exists()
    parts = RecordsFile(paths.part_digests, step, PartDigest) if has_parts else None
    return DigestFiles(steps, parts if mode == "parts" else None) if steps and mode != "off" else None


def digests_mode(config: Experiment, device: torch.device) -> str:
    """Return ``checkpoint.digests``, or its default on this device; the same on all ranks."""
    if config.checkpoint.digests is not None:
        return config.checkpoint.digests
    if config.optimization.on_spike is not None:
        return "steps"
    is_exact = device.type == "cpu" if config.deterministic is None else config.deterministic
    return "steps" if is_exact else "off"


def samples_digest(batches: Sequence[Batch]) -> int:
    """Return the digest of the indices that a rank has read for a step; spare slots do not count."""
    total = 0
    for batch in batches:
        if batch.weight > 0:
            total += xxhash.xxh3_64_intdigest(batch.samples, seed=batch.number)
    return total & _ALL


@dataclass
class StepDigests(StepObserver):
    """Collects the digests of one rank's steps. ``writer``: on rank 0 only.

    ``owns_loss``: of this rank's strategy; a rank without it contributes nothing.
    """

    writer: DigestWriter[StepDigest] | None
    attempt: int
    owns_loss: bool
    every_steps: int = EVERY_STEPS
    parts: PartDigests | None = None
    _steps: list[_Step] = field(default_factory=list)
    _exchanged: deque[_Exchanged] = field(default_factory=deque)

    @override
    def step_done(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        samples = samples_digest(batches) if self.owns_loss else 0
        self._steps.append(_Step(step + 1, samples, result.loss, result.grad_norm))
        if (step + 1) % self.every_steps == 0:
            self.exchange()
        if self.parts is not None:
            self.parts.step_done(step + 1, result.loss)

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
        if self.owns_loss:
            losses = torch.stack([step.loss for step in steps]).to(torch.float64)
            table[:, 2 + dist.get_rank()] = losses.view(torch.int64)
        if world_size > 1:
            dist.all_reduce(table)
        if self.writer is None:
            return
        with_norm = [step.grad_norm for step in steps if step.grad_norm is not None]
        norms = (torch.stack(with_norm) if with_norm else torch.zeros(0, device=device)).to(torch.float64)
        has_norm = [step.grad_norm is not None for step in steps]
        numbers = [step.step for step in steps]
        self._exchanged.append(_Exchanged(numbers, HostCopy(table, norms), has_norm))

    def drain(self, *, wait: bool) -> None:
        """Write the digests whose numbers have arrived, or wait for all that were exchanged."""
        while self._exchanged and (wait or self._exchanged[0].table_and_norms.is_ready):
            assert self.writer is not None
            self.writer.append(self._exchanged.popleft().digests(self.attempt))

    def sync(self) -> None:
        """Sync the written digests to the disk. Any thread."""
        if self.writer is not None:
            self.writer.sync()
        if self.parts is not None:
            self.parts.sync()


class TensorDigests(ModuleWatch):
    """The digests of one rank's tensors in a replay, for ``hpc-train bisect``; waits for the device.

    ``traced``: the steps of which the gradients, and each module's inputs, outputs and their gradients, get a
    digest; ``watches``: False for compiled modules, which hooks would change. In a pipeline modules have
    none. ``states``: the steps after which each tensor of the state gets one, besides the traced ones; other
    steps have one of the whole state if ``every_state``.
    """

    def __init__(
        self,
        state: TrainState,
        begin: int,
        traced: range,
        states: Collection[int],
        *,
        watches: bool,
        every_state: bool = True,
    ) -> None:
        super().__init__(state.model)
        self._state = state
        self._every_state = every_state
        self._traced = traced
        self._states = {*states, *traced, *range(traced.start - 1, traced.stop - 1)}
        self._watches = watches
        #: Micro-batch, ``input``, ``output`` or ``backward`` (the gradient of the output), module, digest.
        self._events: list[tuple[int | None, *tuple[str, ...]]] = []
        self._gradients: dict[str, str] = {}
        self._number: int | None = None
        self._is_in_forward = False
        self._watch(begin + 1)

    def _watch(self, step: int) -> None:
        """Register or remove the hooks for ``step``."""
        self._events, self._is_in_forward = [], False
        is_due = self._watches and step in self._traced
        if is_due and not self._handles:
            self.register()
        elif not is_due:
            self.remove()

    @override
    def _note(self, name: str, value: Any, *, is_output: bool) -> None:
        # Activation checkpointing calls modules again during backward, but not the whole model.
        self._is_in_forward = self._is_in_forward or not (name or is_output)
        tensors = list(floating_tensors(value))
        if not (self._is_in_forward and tensors):
            return
        self._events.append((None, "output" if is_output else "input", name, tensor_digest(tensors)))
        for tensor in tensors if is_output else ():
            if tensor.requires_grad:
                tensor.register_hook(self._noting_gradient(name))

    def _noting_gradient(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            if self._handles:
                self._events.append((self._number, "backward", name, tensor_digest([gradient])))

        return note

    def end_forward(self, number: int) -> None:
        """Assign the events of the forward that has ended to its micro-batch."""
        self._events = [
            (number if of_batch is None else of_batch, *event) for of_batch, *event in self._events
        ]
        self._number, self._is_in_forward = number, False

    def end_backward(self) -> None:
        """Compute the digests of the gradients, before they are clipped."""
        events, self._gradients = self._events, {}
        self.remove()
        self._events = events
        strategy = self._state.strategy
        for name, parameter in strategy.optimized().items():
            if parameter.grad is not None:
                pieces = strategy.pieces(parameter.grad, parameter)
                self._gradients[name] = tensor_digest(piece.local for piece in pieces)

    def of_step(self, step: int) -> dict[str, Any]:
        """Return the events and gradients of a traced step, and prepare for the next step."""
        traced = {"events": self._events, "gradients": self._gradients}
        self._watch(step + 1)
        return traced if step in self._traced else {}

    def of_state(self, step: int) -> dict[str, Any]:
        """Return the digest of the state after ``step``; with those of its tensors if they are requested."""
        if not (self._every_state or step in self._states):
            return {}
        tensors = tensor_digests(self._state)
        state = {"state": xxhash.xxh3_64_hexdigest(json.dumps(tensors, sort_keys=True).encode())}
        return state | ({"tensors": tensors} if step in self._states else {})
