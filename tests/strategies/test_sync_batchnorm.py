"""BatchNorm over all ranks against one process that sees their micro-batches as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.strategies.batchnorm import SyncedBatchNorm, sync_batchnorm
from tests.forwards import PlainForward
from tests.rank_context import make_strategy
from tests.ranks import run_ranks
from tests.strategies.test_data_parallel import degrees_of, full

CPU = torch.device("cpu")
MICRO_BATCHES = 4
NAMES = ("ddp", "zero1", "fsdp")


def make_model(momentum: float | None = 0.1) -> nn.Module:
    """Every kind of BatchNorm: of rows, of images, timm's with an activation, one under two names."""
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4, momentum=momentum)
    images = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        shared,
        nn.Conv2d(4, 4, 3),
        BatchNormAct2d(4, momentum=momentum),
        shared,
    )
    rows = nn.BatchNorm1d(4, affine=False, momentum=momentum)
    return nn.Sequential(images, nn.AdaptiveAvgPool2d(1), nn.Flatten(), rows, nn.Linear(4, 3))


def make_batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = 3 + number + torch.randn(2, 2, 6, 6, generator=generator, dtype=torch.float64)
    targets = torch.tensor([number % 3, (number + 1) % 3])
    return Batch(0, number, 1 / MICRO_BATCHES, images, targets, torch.ones(2, dtype=torch.bool))


def slots_of(rank: int, world_size: int) -> list[Batch]:
    return [make_batch(number) for number in range(rank, MICRO_BATCHES, world_size)]


def train(rank: int, world_size: int, name: str, momentum: float | None, precision: str) -> dict[str, Any]:
    model = sync_batchnorm(make_model(momentum), CPU, MICRO_BATCHES)
    strategy = make_strategy(name, rank, degrees_of(name, world_size), precision)
    strategy.place(model, [model[0]])
    dtype = choose_precision(precision, CPU).param_dtype
    optimizer = torch.optim.SGD(strategy.optimized().values(), lr=0.1)
    gradients: dict[str, Tensor] = {}
    for _ in range(3):
        optimizer.zero_grad()
        strategy.accumulate(slots_of(rank, world_size), PlainForward(cast_loss(dtype)))
        gradients = {key: full(value.grad).clone() for key, value in strategy.optimized().items()}
        optimizer.step()
        strategy.weights_changed()
    state = {key: full(value).clone() for key, value in model.state_dict().items()}
    model.eval()
    return {"gradients": gradients, "state": state}


def cast_loss(dtype: torch.dtype) -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch.inputs.to(dtype)), batch.targets)

    return loss


def train_alone(ranks: int, momentum: float | None) -> dict[str, Any]:
    """Plain PyTorch: the micro-batches of a slot as one batch."""
    model = make_model(momentum).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for begin in range(0, MICRO_BATCHES, ranks):
            batches = [make_batch(number) for number in range(begin, begin + ranks)]
            images = torch.cat([batch.inputs for batch in batches])
            targets = torch.cat([batch.targets for batch in batches])
            loss = nn.functional.cross_entropy(model(images), targets)
            (loss * ranks / MICRO_BATCHES).backward()
        gradients = {key: full(value.grad).clone() for key, value in model.named_parameters()}
        optimizer.step()
    return {"gradients": gradients, "state": model.state_dict()}


def of_all_kinds(rank: int, world_size: int) -> dict[str, Any]:
    found = {name: train(rank, world_size, name, 0.1, "fp64") for name in NAMES}
    found["cumulative"] = train(rank, world_size, "ddp", None, "fp64")
    found["fp32"] = train(rank, world_size, "fsdp", 0.1, "fp32")
    found["evaluated"] = evaluate_on_rank_0(rank)
    found["compiled"] = compiled(rank)
    return found


def evaluate_on_rank_0(rank: int) -> bool:
    """An evaluation asks for nobody: ranks have other numbers of batches there."""
    model = sync_batchnorm(make_model(), CPU, MICRO_BATCHES).double().eval()
    plain = make_model().double().eval()
    if rank:
        return True
    return torch.equal(model(make_batch(0).inputs), plain(make_batch(0).inputs))


def compiled(rank: int) -> float:
    """Return how far a compiled layer is from one that is not. Graphs break at the collective."""
    layer = sync_batchnorm(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), CPU, MICRO_BATCHES).double()
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    gradients = []
    for forward in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        forward(inputs).square().sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    return float((gradients[0] - gradients[1]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_statistics_gradients_and_weights_are_those_of_one_batch(ranks: int, tmp_path: Path) -> None:
    expected, cumulative = train_alone(ranks, 0.1), train_alone(ranks, None)
    for found in run_ranks(ranks, of_all_kinds, folder=tmp_path):
        for name in NAMES:
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found["cumulative"], cumulative, rtol=1e-9, atol=1e-9)
        for key, value in found["fp32"]["state"].items():
            torch.testing.assert_close(
                value.double(), expected["state"][key].double(), rtol=1e-4, atol=1e-5, msg=key
            )
        assert found["evaluated"]
        assert found["compiled"] < 1e-12


def convert(rank: int, world_size: int) -> list[Any]:
    """Return what the layers become on CPU and CUDA, and the errors of those that can't be converted."""
    before, names = make_model(), list(make_model().state_dict())
    on_cpu = sync_batchnorm(before, CPU, 4)
    on_cuda = sync_batchnorm(make_model(), torch.device("cuda"), 4)
    kinds = [
        [
            type(layer).__name__
            for layer in model.modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        for model in (on_cpu, on_cuda)
    ]
    same = [list(model.state_dict()) == names for model in (on_cpu, on_cuda)]
    errors = []
    for model, micro_batches in ((nn.Sequential(Odd(3)), 4), (make_model(), 3)):
        with pytest.raises(BadFileError) as error:
            sync_batchnorm(model, CPU, micro_batches)
        errors.append(str(error.value))
    return [kinds, same, on_cpu[0][1] is on_cpu[0][4], errors]


class Odd(nn.BatchNorm1d):
    """A BatchNorm that does something else with its input, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.abs())


@pytest.mark.slow
def test_layers_are_replaced_by_kind_under_their_names_and_odd_ones_are_refused(tmp_path: Path) -> None:
    for kinds, same, is_shared, errors in run_ranks(2, convert, folder=tmp_path):
        assert kinds == [
            [SyncedBatchNorm.__name__] * 3,
            [nn.SyncBatchNorm.__name__, SyncBatchNormAct.__name__, nn.SyncBatchNorm.__name__],
        ]
        assert same == [True, True] and is_shared
        assert "parallel.sync_batchnorm: 0 is a Odd" in errors[0]
        assert "a number of ranks that divides 3 micro-batches, got 2" in errors[1]


def test_one_rank_keeps_its_model() -> None:
    model = make_model()
    assert sync_batchnorm(model, CPU, 3) is model
    assert not dist.is_initialized() and Degrees().world_size == 1
