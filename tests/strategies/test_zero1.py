"""zero1: views of parameters are optimised, slices reach all ranks, and what is saved is as under fsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.registry import load
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.optimization import Optimization
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.zero1 import _buckets, gather_slices, own_slice
from tests.forwards import PlainForward, make_train_state, optimizer_step
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

CPU = torch.device("cpu")
#: Rows that no number of ranks here divides, fewer rows than ranks, none, images, whole numbers.
SHAPES = ((7, 3), (2, 5), (1,), (9,), (0, 3), (4, 3, 2, 2))


class Odd(nn.Module):
    """A number among the parameters, frozen and tied ones, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(7, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.tied(self.frozen(self.first(inputs)))).tanh()
        return self.last(hidden).square().mean() * self.scale


def batch(number: int, weight: float) -> Batch:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return Batch(0, number, weight, inputs, torch.zeros(4), torch.ones(4, dtype=torch.bool))


class Training:
    """One rank under a strategy, with AdamW."""

    def __init__(self, rank: int, world_size: int, name: str, precision: str = "fp64") -> None:
        degrees = Degrees(replicate=world_size) if name == "ddp" else Degrees(shard=world_size)
        context = RankContext(rank, degrees, CPU, choose_precision(precision, CPU))
        self.strategy: Any = load("strategies", name)(context)  # type: ignore[operator]
        self.model, self.context = Odd(), context
        self.strategy.place(self.model, [])
        self.optimizer = torch.optim.AdamW(self.strategy.optimized().values(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if precision == "fp16" else None

    def accumulate(self, scale: float = 1.0) -> None:
        ranks = self.context.world_size

        def loss_of(model: nn.Module, batch: Batch) -> Tensor:
            with self.context.precision.autocast(CPU):
                return model(batch.inputs.to(self.context.precision.param_dtype)) * scale

        def scaled(loss: Tensor) -> Tensor:
            return loss if self.scaler is None else self.scaler.scale(loss)

        slots = [batch(self.context.rank + ranks * slot, 1 / (2 * ranks)) for slot in range(2)]
        self.strategy.accumulate(slots, PlainForward(loss_of, scaled))

    def step(self, max_norm: float | None = None, scale: float = 1.0) -> Tensor | None:
        self.accumulate(scale)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = None if max_norm is None else self.strategy.clip_gradients(max_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.weights_changed()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def compare_with_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Train under both, clipped at some steps; then say what the optimizer of zero1 holds."""
    trainings = {name: Training(rank, world_size, name) for name in ("ddp", "zero1")}
    norms = {name: [one.step(norm) for norm in (None, 0.05, 100.0)] for name, one in trainings.items()}
    zero1 = trainings["zero1"]
    parameters = dict(zero1.model.named_parameters())
    optimized = zero1.strategy.optimized()
    return {
        "weights": {name: one.weights() for name, one in trainings.items()},
        "norms": norms,
        "state": {name: whole_state(one) for name, one in trainings.items()},
        "names": list(optimized),
        "views": all(is_view(value, parameters[name]) for name, value in optimized.items()),
        "state bytes": {name: state_bytes(one) for name, one in trainings.items()},
        "fp16": fp16_with_an_overflow(rank, world_size),
        "gathered": gather_odd_shapes(rank, world_size),
        "gaps": numbers_and_gaps(rank, world_size),
        "one slice": overflow_in_one_slice(rank, world_size),
    }


def whole_state(training: Training) -> list[Tensor]:
    state = [
        training.optimizer.state[value]["exp_avg_sq"] for value in training.strategy.optimized().values()
    ]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in state]


def state_bytes(training: Training) -> int:
    state = [values["exp_avg"] for values in training.optimizer.state.values()]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in state)


def is_view(part: Tensor, whole: Tensor) -> bool:
    local = part.to_local() if isinstance(part, DTensor) else part
    return local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() or not local.numel()


def fp16_with_an_overflow(rank: int, world_size: int) -> dict[str, Any]:
    """The second step overflows, on one rank alone: nobody takes it."""
    found: dict[str, Any] = {}
    for name in ("ddp", "zero1"):
        one = Training(rank, world_size, name, "fp16")
        norm = one.step(0.05)
        before = one.weights()
        one.step(0.05, scale=1e30 if rank == 0 else 1.0)
        after = one.weights()
        assert one.scaler is not None
        kept = all(torch.equal(before[key], after[key]) for key in before)
        found[name] = {"norm": norm, "kept": kept, "scale": one.scaler.get_scale(), "weights": after}
    return found


class Numbered(nn.Module):
    """A single number comes first, and a matrix is transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.turned.t() * self.scale).square().mean()


def optimized(rank: int, world_size: int, name: str, precision: str) -> tuple[Any, nn.Module, Optimization]:
    degrees = Degrees(replicate=world_size) if name == "ddp" else Degrees(shard=world_size)
    strategy, model = make_strategy(name, rank, degrees, precision), Numbered()
    config = OptimizerConfig(name="adamw", lr=0.1, args={"fused": True})
    return strategy, model, make_train_state(strategy, model, [], config, 4, precision).optimization


def numbers_and_gaps(rank: int, world_size: int) -> bool:
    """A fused optimizer on a parameter whose rows have gaps, beside ddp."""
    found = []
    for name in ("ddp", "zero1"):
        strategy, model, optimization = optimized(rank, world_size, name, "fp64")
        for _ in range(3):
            forward = PlainForward(lambda net, each: net(each.inputs), optimization.scale)
            strategy.accumulate([batch(rank, 1 / world_size)], forward)
            optimizer_step(optimization)
            strategy.weights_changed()
        found.append({key: value.detach().clone() for key, value in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    return True


def overflow_in_one_slice(rank: int, world_size: int) -> float:
    """Only the last rank's slice overflows, and what comes first is held whole by all."""
    strategy, model, optimization = optimized(rank, world_size, "zero1", "fp16")
    model.register_parameter("rows", nn.Parameter(torch.ones(2 * world_size, 3)))
    sgd = OptimizerConfig(name="sgd", lr=0.1)
    optimization = make_train_state(strategy, model, [], sgd, 4, "fp16").optimization
    assert optimization.scaler is not None
    optimization.scaler.scale(torch.ones(()))  # makes the scale
    for part in strategy.optimized().values():
        part.grad = torch.zeros_like(part)
    if rank == world_size - 1:
        strategy.optimized()["rows"].grad.to_local().fill_(torch.inf)
    strategy.optimized()["scale"].grad.to_local().fill_(1.0)
    optimizer_step(optimization)
    assert float(model.get_parameter("scale")) == 1.5, "a rank took the step"
    return optimization.scaler.get_scale()


def gather_odd_shapes(rank: int, world_size: int) -> bool:
    """Return True if tensors of which each rank has its slice alone come back, in buckets of any size."""
    for bucket_bytes in (1, 100, 1 << 20):
        for dtype in (torch.float64, torch.bfloat16):
            expected = [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for shape in SHAPES]
            expected[-1] = expected[-1].to(memory_format=torch.channels_last)
            tensors = [torch.full_like(tensor, -1) for tensor in expected]
            for tensor, whole in zip(tensors, expected, strict=True):
                own_slice(tensor, rank, world_size).copy_(own_slice(whole, rank, world_size))
            gather_slices([*tensors, torch.ones(3)], rank, world_size, bucket_bytes)
            if not all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)):
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_state_and_norms_are_ddps_with_a_share_of_its_state(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, compare_with_ddp, folder=tmp_path):
        for what in ("weights", "norms", "state"):
            torch.testing.assert_close(found[what]["zero1"], found[what]["ddp"], rtol=1e-12, atol=1e-14)
        names = ["scale", "first.weight", "first.bias", "tied.weight", "last.weight", "last.bias"]
        assert found["names"] == names and found["views"]
        sizes = found["state bytes"]
        assert sizes["zero1"] < sizes["ddp"] * (1 / ranks + 0.2)
        overflow = found["fp16"]
        assert overflow["zero1"]["kept"] and overflow["zero1"]["scale"] == overflow["ddp"]["scale"] == 2.0**5
        torch.testing.assert_close(overflow["zero1"], overflow["ddp"], rtol=1e-4, atol=1e-5)
        assert found["gathered"] and found["gaps"]
        assert found["one slice"] == 2.0**15


def test_buckets_are_bounded_and_hold_every_row_once() -> None:
    tensors = [torch.zeros(10, 4), torch.zeros(3), torch.zeros(5, dtype=torch.float64), torch.zeros(0, 2)]
    buckets = list(_buckets(tensors, world_size=2, bucket_bytes=64))
    for bucket in buckets:
        assert len({rows.whole.dtype for rows in bucket}) == 1
        assert sum(rows.numel * rows.whole.itemsize * 2 for rows in bucket) <= 64
    for tensor in tensors[:3]:
        rows = [r for bucket in buckets for r in bucket if r.whole is tensor]
        assert sum(r.count for r in rows) == -(-len(tensor) // 2)
        assert [r.begin for r in rows] == [sum(r.count for r in rows[:n]) for n in range(len(rows))]


def test_one_rank_alone_optimises_its_parameters_and_needs_no_group() -> None:
    training = Training(0, 1, "zero1")
    assert not dist.is_initialized()
    before = training.weights()
    training.step(1.0)
    assert all(value is dict(training.model.named_parameters())[name]
               for name, value in training.strategy.optimized().items())  # fmt: skip
    assert not torch.equal(before["first.weight"], training.weights()["first.weight"])
