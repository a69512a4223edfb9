"""One rank of a case: the worker's own ``build`` and a loop as the trainer has it, everything gathered."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.degrees import Degrees, find_degrees
from hpc_train.config.schema import Experiment
from hpc_train.engine.forward import TrainingForward
from hpc_train.engine.optimization import Optimization
from hpc_train.engine.training_state import NamedTensors
from hpc_train.plan.batches import BatchArithmetic
from hpc_train.runtime.precision import choose_precision
from hpc_train.strategies.base import Strategy
from hpc_train.tasks.classification import Classification
from hpc_train.worker.learner import Learner, build, placement
from tests.parallelism.batches import INFO, slots
from tests.parallelism.cases import STEPS, Case

_CPU = torch.device("cpu")


@dataclass
class Trained:
    """What training leaves on a rank, tensors whole."""

    losses: Tensor
    #: Of the last step, before clipping.
    gradients: dict[str, Tensor]
    #: Parameters and buffers.
    weights: dict[str, Tensor]
    #: Of the weights; empty without EMA.
    average: dict[str, Tensor] = field(default_factory=dict)
    #: Steps that fp16's scaler left out.
    skipped: tuple[int, ...] = ()


class Trainee:
    """A learner on this rank and what it is fed with."""

    def __init__(self, config: Experiment, rank: int, ranks: int) -> None:
        torch.compiler.reset()
        torch._dynamo.config.suppress_errors = False  # compile.fallback of an earlier case
        self.config = config
        self.precision = choose_precision(config.precision, _CPU)
        degrees = find_degrees(config.parallel, ranks, ranks)
        assert isinstance(degrees, Degrees), degrees
        self.place = (degrees.data_rank(rank), degrees.data_ranks)
        self.batches = BatchArithmetic.of(config.optimization, 10_000, degrees.data_ranks)
        self.task = Classification(config, INFO)
        self.learner = self._build(rank, degrees)

    def _build(self, rank: int, degrees: Degrees) -> Learner:
        """Call what the worker calls, told of a rank that is only what ``placement`` asks for."""
        facts = SimpleNamespace(rank=rank, world_size=degrees.world_size)
        told: Any = SimpleNamespace(
            experiment=self.config, facts=facts, degrees=degrees, device=_CPU, precision=self.precision
        )
        return build(self.config, INFO, self.batches, placement(told))

    def step(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Train one step as ``Trainer._train_step`` does; return this rank's loss, and gradients."""
        strategy, optimization = self.learner.strategy, self.learner.optimization
        optimization.set_learning_rate(step)
        strategy.share_buffers(all_persistent=False)
        own = slots(step, *self.place, self.batches.micro_batches, self.precision.param_dtype)
        loss = strategy.accumulate(own, self._forward(strategy, optimization))
        gradients: dict[str, Tensor] = {}

        def clip() -> Tensor | None:
            if step == STEPS - 1:
                held = {name: p for name, p in strategy.optimized().items() if p.grad is not None}
                gradients.update(whole(strategy, {name: p.grad for name, p in held.items()}, held))
            most = self.config.optimization.clip_grad_norm
            return None if most is None else strategy.clip_gradients(most)

        optimization.step(clip)
        strategy.weights_changed()
        if self.learner.ema is not None:
            self.learner.ema.update()
        return loss, gradients

    def _forward(self, strategy: Strategy, optimization: Optimization) -> TrainingForward:
        return TrainingForward(
            seed=self.config.seed,
            task=self.task,
            device=_CPU,
            compile=self.config.compile,
            context=nullcontext if strategy.casts else lambda: self.precision.autocast(_CPU),
            to_input=lambda batch: batch,
            scale=optimization.scale,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers; asserts that buffers are the same on all ranks. Collective."""
        held = self.held()
        return whole(self.learner.strategy, held, held)

    def held(self) -> dict[str, Tensor]:
        """Return parameters and buffers that this rank has a part of."""
        return NamedTensors.of(self.learner.model).tensors

    def average(self) -> dict[str, Tensor]:
        """Return EMA's weights. Collective."""
        ema = self.learner.ema
        if ema is None:
            return {}
        ema.share_buffers(self.learner.strategy)
        return whole(self.learner.strategy, ema.averages, self.held())


def whole(
    strategy: Strategy, tensors: Mapping[str, Tensor | None], likes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Put tensors together of what all ranks hold of them, as ``Strategy.pieces`` tells it. Collective.

    Asserts that ranks that hold the same hold it alike, and that nothing is missing.
    """
    own = [
        (name, piece.shape, piece.offset, piece.local.detach().clone(memory_format=torch.contiguous_format))
        for name, tensor in tensors.items()
        if tensor is not None
        for piece in strategy.pieces(tensor, likes[name])
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, offset, local in (piece for rank in ranks for piece in rank):
        whole = found.setdefault(name, torch.empty(shape, dtype=local.dtype))
        is_seen = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        place = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        again = is_seen[place]
        assert torch.equal(whole[place][again], local[again]), f"{name} is not the same on all ranks"
        whole[place], is_seen[place] = local, True
    assert all(bool(each.all()) for each in seen.values()), "a part is on no rank"
    return found


def train(rank: int, ranks: int, case: Case) -> Trained:
    """Train on this rank. Collective."""
    trainee = Trainee(case.experiment, rank, ranks)
    trainee.learner.wrapped.train()
    losses, skipped = [], []
    gradients: dict[str, Tensor] = {}
    scaler = trainee.learner.optimization.scaler
    for step in range(STEPS):
        scale = None if scaler is None else scaler.get_scale()
        loss, gradients = trainee.step(step)
        losses.append(loss)
        if scale is not None and scaler is not None and scaler.get_scale() < scale:
            skipped.append(step)
    return Trained(torch.stack(losses), gradients, trainee.weights(), trainee.average(), tuple(skipped))
