"""One training step against the same step in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.non_finite import Guard
from hpc_train.training.optimization import Optimization, make_optimizer
from hpc_train.training.step import StepResult, train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.train_state import Ema, TrainState
from tests.experiments import tiny_experiment
from tests.forwards import PlainForward

pytestmark = pytest.mark.usefixtures("one_rank_group")

CPU = torch.device("cpu")
MAX_NORM = 0.05
DECAY = 0.9


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def micro_batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    inputs = [torch.randn(4, 5, generator=generator) for _ in range(2)]
    return [
        Batch(step, i, 0.5, x, torch.zeros(4), torch.ones(4, dtype=torch.bool)) for i, x in enumerate(inputs)
    ]


class Training:
    """Ours, on one rank; ``policy`` is ``optimization.on_non_finite``."""

    def __init__(self, policy: str = "stop", seed: int = 0) -> None:
        optimizer = {"name": "adamw", "lr": 0.01}
        keys = {"optimizer": optimizer, "clip_grad_norm": MAX_NORM, "on_non_finite": policy}
        self.config = tiny_experiment(keys).optimization
        precision = choose_precision("fp32", CPU)
        strategy = DDPStrategy(RankContext(0, Degrees(), CPU, precision))
        self.model = model(seed)
        wrapped = strategy.place(self.model, [])
        made = make_optimizer(self.config.optimizer, strategy.optimized(), 8)
        optimization = Optimization(made, lambda step: 1 / (step + 1), precision, CPU)
        self.state = TrainState(self.model, wrapped, strategy, optimization, Ema(self.model, DECAY))

    def step(self, step: int, factor: float = 1.0, **keys: Any) -> StepResult:
        guard = Guard(self.config, self.model, norm_counts=True)
        forward = PlainForward(lambda net, each: net(each.inputs).square().mean() * factor)
        return train_step(self.state, step, micro_batches(step), forward, guard, MAX_NORM, **keys)


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_bitwise_equal_to_plain_pytorch(seed: int) -> None:
    ours, plain = Training(seed=seed), model(seed)
    # With the kernel that ours uses: torch's default on the CPU rounds otherwise, in one of five seeds.
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    average = [p.detach().clone() for p in plain.parameters()]
    for step in range(4):
        done = ours.step(step)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 / (step + 1))
        optimizer.zero_grad()
        losses = [plain(batch.inputs).square().mean() for batch in micro_batches(step)]
        for loss in losses:
            (loss * 0.5).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(plain.parameters()), 1 - DECAY)
        assert done.is_allowed and done.learning_rate == optimizer.param_groups[0]["lr"]
        assert done.grad_norm is not None and norm > MAX_NORM and torch.equal(done.grad_norm, norm)
        torch.testing.assert_close(done.loss, sum(loss.detach().double() for loss in losses) / 2)
        assert all(
            torch.equal(a, b) for a, b in zip(ours.model.parameters(), plain.parameters(), strict=True)
        )
    assert ours.state.ema is not None
    assert all(torch.equal(a, b) for a, b in zip(ours.state.ema.averages.values(), average, strict=True))
    assert all(p.grad is None for p in ours.model.parameters()), (
        "gradients would take memory in an evaluation"
    )


def test_weights_change_only_after_before_update_returned() -> None:
    ours, seen = Training(), []
    start = [p.detach().clone() for p in ours.model.parameters()]

    def look() -> None:
        assert all(p.grad is not None for p in ours.model.parameters())
        seen.append(all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), start, strict=True)))

    ours.step(0, before_update=look)
    assert seen == [True]
    assert not torch.equal(next(ours.model.parameters()), start[0])


def test_a_step_that_is_not_allowed_changes_neither_weights_nor_average() -> None:
    ours = Training("skip")
    ours.step(0)
    assert ours.state.ema is not None
    held = [*ours.model.parameters(), *ours.state.ema.averages.values()]
    before = [tensor.detach().clone() for tensor in held]
    assert not ours.step(1, factor=torch.inf).is_allowed
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert all(p.grad is None for p in ours.model.parameters())
