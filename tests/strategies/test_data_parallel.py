"""Data-parallel strategies against plain PyTorch: the same gradients, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.config.degrees import Degrees
from hpc_train.config.training_sections import ParallelConfig
from hpc_train.errors import BadFileError
from hpc_train.registry import load
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.precision import choose_precision
from hpc_train.strategies.base import Placement
from hpc_train.strategies.buffers import buffers_kept, training_buffers
from tests.forwards import PlainForward
from tests.ranks import run_ranks

MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 3
NAMES = ("ddp", "fsdp", "hsdp", "zero1", "zero2")


class Counting(nn.Module):
    """A layer whose training forward reads a buffer that it also changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(inputs) * (1 + self.calls)


def make_model(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)]
    extra: list[nn.Module] = {"plain": [], "batchnorm": [nn.BatchNorm1d(6)], "counting": [Counting()]}[kind]
    return nn.Sequential(nn.Linear(5, 6), *middle, *extra, nn.Linear(6, 2))


def make_batch(number: int, weight: float) -> Batch:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(MICRO_BATCH_SIZE, 5, generator=generator, dtype=torch.float64)
    return Batch(
        0, number, weight, inputs, torch.arange(MICRO_BATCH_SIZE) % 2, torch.ones(3, dtype=torch.bool)
    )


def slots(rank: int, world_size: int) -> list[Batch]:
    own = [make_batch(number, 1 / MICRO_BATCHES) for number in range(rank, MICRO_BATCHES, world_size)]
    spare = [make_batch(rank, 0.0)] * (-(-MICRO_BATCHES // world_size) - len(own))
    return own + spare


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.targets)


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def degrees_of(strategy: str, world_size: int) -> Degrees:
    if strategy == "ddp":
        return Degrees(replicate=world_size)
    replicas = 2 if strategy == "hsdp" and world_size % 2 == 0 else 1
    return Degrees(replicate=replicas, shard=world_size // replicas)


def step_of(rank: int, world_size: int, name: str, kind: str) -> dict[str, Any]:
    """Two accumulations and a clipping on one rank; everything gathered."""
    device = torch.device("cpu")
    placement = Placement(rank, degrees_of(name, world_size), device, choose_precision("fp64", device))
    strategy: Any = load("strategies", name)(placement)  # type: ignore[operator]
    model = make_model(kind)
    strategy.place(model, [child for child in model if isinstance(child, nn.Sequential)])
    losses = []
    for _ in range(2):
        model.zero_grad()
        strategy.share_buffers(all_persistent=False)
        losses.append(strategy.accumulate(slots(rank, world_size), PlainForward(loss_of)))
    gradients = {key: full(value.grad).clone() for key, value in strategy.optimized().items()}
    norm = strategy.clip_gradients(0.01)
    clipped = {key: full(value.grad).clone() for key, value in strategy.optimized().items()}
    strategy.share_buffers(all_persistent=True)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    pieces = {key: strategy.pieces(value, value)[0] for key, value in strategy.optimized().items()}
    held = {key: (piece.shape, piece.offset, tuple(piece.local.shape)) for key, piece in pieces.items()}
    return {"loss": losses[-1], "gradients": gradients, "clipped": clipped, "norm": norm, "buffers": buffers,
            "held": held}  # fmt: skip


def plain_gradients(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    model = make_model(kind).double()
    mean = torch.stack([loss_of(model, make_batch(number, 0)) for number in range(MICRO_BATCHES)]).mean()
    mean.backward()
    return {key: full(value.grad) for key, value in model.named_parameters()}, mean.detach()


def steps_of(rank: int, world_size: int, kind: str) -> dict[str, dict[str, Any]]:
    return {name: step_of(rank, world_size, name, kind) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_and_loss_equal_plain_pytorch_on_any_number_of_ranks(
    world_size: int, tmp_path: Path
) -> None:
    found = run_ranks(world_size, steps_of, "batchnorm", folder=tmp_path)
    for name in NAMES:
        assert_equals_plain_pytorch([rank[name] for rank in found])


def assert_equals_plain_pytorch(ranks: list[dict[str, Any]]) -> None:
    expected, mean = plain_gradients("batchnorm")
    torch.testing.assert_close(sum(rank["loss"] for rank in ranks), mean, rtol=1e-12, atol=0)
    for rank in ranks:
        torch.testing.assert_close(rank["gradients"], expected, rtol=1e-9, atol=1e-12)
        norm = torch.cat([value.flatten() for value in expected.values()]).norm()
        torch.testing.assert_close(rank["norm"].double(), norm, rtol=1e-6, atol=0)
        clipped = torch.cat([value.flatten() for value in rank["clipped"].values()]).norm()
        torch.testing.assert_close(clipped, torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_rank_0s_buffers_are_the_runs_and_pieces_cover_each_tensor(tmp_path: Path) -> None:
    found = run_ranks(3, steps_of, "counting", folder=tmp_path)
    for name in NAMES:
        assert_buffers_and_pieces(name, [rank[name] for rank in found])


def assert_buffers_and_pieces(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        # Two steps of two slots each on rank 0; the spare slots of ranks 1 and 2 leave no trace.
        assert rank["buffers"] == {"3.calls": torch.tensor(4.0, dtype=torch.float64)}
    for key, (shape, _, _) in ranks[0]["held"].items():
        rows = [rank["held"][key][2][0] for rank in ranks]
        assert rows == [shape[0]] * 3 if name == "ddp" else sum(rows) == shape[0]


def test_batchnorm_statistics_are_not_read_in_training() -> None:
    assert training_buffers(make_model("batchnorm")) == {}
    assert list(training_buffers(make_model("counting"))) == ["3.calls"]


def test_a_forward_that_does_not_count_leaves_buffers_alone() -> None:
    model = make_model("batchnorm").double()
    before = {key: value.clone() for key, value in model.named_buffers()}
    with buffers_kept(model):
        model(make_batch(0, 0.0).inputs)
        assert model[3].num_batches_tracked == 1
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_batchnorm_under_fsdp_in_bf16_is_refused() -> None:
    device = torch.device("cpu")
    strategy: Any = load("strategies", "fsdp")(  # type: ignore[operator]
        Placement(0, Degrees(), device, choose_precision("bf16", device))
    )
    with pytest.raises(Exception, match=r"write fp32, or parallel\.strategy: ddp"):
        strategy.place(make_model("batchnorm"), [])


def train_with_an_unused_parameter(rank: int, world_size: int, args: dict[str, Any]) -> str | list[Tensor]:
    device = torch.device("cpu")
    placement = Placement(
        rank,
        Degrees(replicate=world_size),
        device,
        choose_precision("fp64", device),
        parallel=ParallelConfig(args=args),
    )
    strategy: Any = load("strategies", "ddp")(placement)  # type: ignore[operator]
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    strategy.place(model, [])
    try:
        for _ in range(3):
            model.zero_grad()
            strategy.accumulate(slots(rank, world_size), PlainForward(loss_of))
    except BadFileError as error:
        return str(error)
    return [value.grad for name, value in model.named_parameters() if name != "unused"]


@pytest.mark.slow
def test_an_unused_parameter_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    for said in run_ranks(2, train_with_an_unused_parameter, {}, folder=tmp_path):
        assert "the loss does not use unused; write parallel.args: {find_unused_parameters: true}" in said
    allowed = {"find_unused_parameters": True}
    expected = list(plain_gradients("plain")[0].values())
    for found in run_ranks(2, train_with_an_unused_parameter, allowed, folder=tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_arguments_of_a_strategy_are_refused(name: str) -> None:
    device = torch.device("cpu")
    placement = Placement(
        0, Degrees(), device, choose_precision("fp32", device), parallel=ParallelConfig(args={"bucket": 3})
    )
    with pytest.raises(BadFileError, match=r"parallel\.args: .*'bucket'"):
        load("strategies", name)(placement)  # type: ignore[operator]
