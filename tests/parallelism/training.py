"""One rank of a case: the worker's own ``build`` and a loop as the trainer has it, everything gathered."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.forward import TrainingForward
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.strategies.base import Strategy
from hpc_train.training.tasks.classification import Classification
from hpc_train.training.train_state import TrainState, build, context
from tests.parallelism.batches import INFO, slots
from tests.parallelism.cases import STEPS, Case
from tests.parallelism.pickled import dumps
from tests.rank_context import as_rank

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
    #: Steps that fp16's scaler skipped.
    skipped: tuple[int, ...] = ()


class Trainee:
    """A train state on this rank and what it is fed with."""

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
        self.train_state = self._build(rank, degrees)

    def _build(self, rank: int, degrees: Degrees) -> TrainState:
        """Call what the worker calls, told of a rank that is only what ``context`` asks for."""
        told = as_rank(self.config, rank, degrees, self.precision)
        return build(self.config, INFO, self.batches, context(told))

    def step(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Train one step as the loop does; return this rank's loss, and gradients before clipping."""
        config, state = self.config, self.train_state
        gradients: dict[str, Tensor] = {}

        def note_gradients() -> None:
            if step == STEPS - 1:
                held = {name: p for name, p in state.strategy.optimized().items() if p.grad is not None}
                gradients.update(whole(state.strategy, {name: p.grad for name, p in held.items()}, held))

        class Noting(Guard):
            """Sees the gradients once they are unscaled."""

            def clip(self, *arguments: Any) -> Tensor | None:
                note_gradients()
                return super().clip(*arguments)

        guard = Noting(config.optimization, state.model, norm_counts=False)
        own = slots(step, *self.place, self.batches.micro_batches, self.precision.param_dtype)
        forward = TrainingForward.of(config, INFO, state, self.task, self.precision, _CPU)
        forward = replace(forward, to_device=lambda batch: batch)
        done = train_step(state, step, own, forward, guard, config.optimization.clip_grad_norm)
        return done.loss, gradients

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers; asserts that buffers are the same on all ranks. Collective."""
        held = self.held()
        return whole(self.train_state.strategy, held, held)

    def held(self) -> dict[str, Tensor]:
        """Return parameters and buffers that this rank has a part of."""
        return NamedTensors.of(self.train_state.model).tensors

    def average(self) -> dict[str, Tensor]:
        """Return EMA's weights. Collective."""
        ema = self.train_state.ema
        if ema is None:
            return {}
        ema.share_buffers(self.train_state.strategy)
        return whole(self.train_state.strategy, ema.averages, self.held())


def whole(
    strategy: Strategy,
    tensors: Mapping[str, Tensor | None],
    likes: Mapping[str, Tensor],
    *,
    has_one_writer: bool = False,
) -> dict[str, Tensor]:
    """Put tensors together from what all ranks own, as in ``Strategy.pieces``. Collective.

    Asserts that ranks that hold the same hold it alike, that nothing is missing, and, if ``has_one_writer``,
    that one rank writes each part.
    """
    own = [
        (name, piece, piece.local.detach().clone(memory_format=torch.contiguous_format))
        for name, tensor in tensors.items()
        if tensor is not None
        for piece in strategy.pieces(tensor, likes[name])
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    parts = [(name, piece.shape, piece.offset, local, piece.is_writer) for name, piece, local in own]
    dist.all_gather_object(gathered, dumps(parts))
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    writers: dict[str, Tensor] = {}
    for name, shape, offset, local, is_writer in (part for rank in gathered for part in pickle.loads(rank)):
        whole = found.setdefault(name, torch.empty(shape, dtype=local.dtype))
        is_seen = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        place = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        writers.setdefault(name, torch.zeros(shape, dtype=torch.int64))[place] += int(is_writer)
        again = is_seen[place]
        assert torch.equal(whole[place][again], local[again]), f"{name} is not the same on all ranks"
        whole[place], is_seen[place] = local, True
    assert all(bool(each.all()) for each in seen.values()), "a part is on no rank"
    assert not has_one_writer or all(bool((each == 1).all()) for each in writers.values())
    return found


def train(rank: int, ranks: int, case: Case) -> Trained:
    """Train on this rank. Collective."""
    trainee = Trainee(case.experiment, rank, ranks)
    trainee.train_state.wrapped.train()
    losses, skipped = [], []
    gradients: dict[str, Tensor] = {}
    scaler = trainee.train_state.optimization.scaler
    for step in range(STEPS):
        scale = None if scaler is None else scaler.get_scale()
        loss, gradients = trainee.step(step)
        losses.append(loss)
        if scale is not None and scaler is not None and scaler.get_scale() < scale:
            skipped.append(step)
    return Trained(torch.stack(losses), gradients, trainee.weights(), trainee.average(), tuple(skipped))
