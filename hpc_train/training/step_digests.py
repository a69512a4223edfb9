"""Digests of training steps: ``checkpoint.digests``.

Every rank has one ``StepDigests``, an observer of its steps; rank 0 writes ``digests.bin``. A step only keeps
its numbers on the device. Every ``EVERY_STEPS`` steps, and before a save, they are exchanged in one reduction
whose result is read when it has arrived, so no step waits for the device.

The samples of a step are the sum, modulo 2^64, of a hash of each micro-batch's number and indices: it does
not depend on the ranks that read them. Losses are gathered by rank and added up in the order of the ranks:
the order in which a reduction adds depends on its algorithm and on the length of its tensor.

``TensorDigests`` computes digests of all tensors, for replays alone.

Legend: R ranks, K steps.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from typing_extensions import override

from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.digests import DigestsFile, StepDigest
from hpc_train.training.checkpoint.staging import Contents
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.non_finite import DigestWriter
from hpc_train.training.step import StepObserver, StepResult
from hpc_train.training.strategies.pieces import local_part
from hpc_train.training.train_state import TrainState

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
    return total & ((1 << 64) - 1)


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


class ModuleWatch(ABC):
    """Receives each module's inputs and outputs, in their order, while its hooks are registered."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._handles: list[Any] = []

    def register(self) -> None:
        """Register the hooks."""
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name)),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @abstractmethod
    def _note(self, name: str, value: Any, *, is_output: bool) -> None:
        """Receive the inputs, or the outputs, of module ``name``."""

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(name, (args, kwargs), is_output=False)

        return note

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self._note(name, output, is_output=True)

        return note


class TensorDigests(ModuleWatch):
    """The digests of one rank's tensors in a replay, for ``hpc-train bisect``; waits for the device.

    ``traced``: the steps of which the gradients, and each module's inputs, outputs and their gradients, get a
    digest; ``watches``: False for compiled modules, which hooks would change. In a pipeline modules have
    none. ``states``: the steps after which each tensor of the state gets one, besides the traced ones.
    """

    def __init__(
        self, state: TrainState, begin: int, traced: range, states: Collection[int], *, watches: bool
    ) -> None:
        super().__init__(state.model)
        self._state = state
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
        pieces = Contents.of(self._state.state, self._state.strategy, {}).pieces
        tensors = {name: tensor_digest(piece.local for piece in parts) for name, parts in pieces.items()}
        state = {"state": xxhash.xxh3_64_hexdigest(json.dumps(tensors, sort_keys=True).encode())}
        return state | ({"tensors": tensors} if step in self._states else {})


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


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a structure, in its order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from floating_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from floating_tensors(part)
