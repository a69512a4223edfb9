"""BatchNorm's running statistics on any number of ranks against one process that trains all micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.strategies.batchnorm import RunningStatistics, only_updates_statistics
from hpc_train.training.strategies.buffers import Buffers
from tests.forwards import PlainForward
from tests.ranks import run_ranks
from tests.strategies.test_data_parallel import MICRO_BATCHES, NAMES, make_batch, place, slots

STEPS = 3


class Twice(nn.Module):
    """One layer that a forward uses twice."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=momentum)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(torch.relu(self.norm(inputs)) + inputs)


class Sometimes(nn.Module):
    """A layer that some micro-batches skip, as LayerDrop does."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=False, momentum=momentum)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs) if inputs.detach().sum() > 0 else inputs


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    momentum = None if kind.endswith("cumulative") else 0.3
    plain = nn.BatchNorm1d(6, momentum=momentum)
    kinds: dict[str, nn.Module] = {
        "plain": plain,
        "frozen": nn.BatchNorm1d(6, momentum=momentum),
        "without statistics": nn.BatchNorm1d(6, track_running_stats=False),
        "one momentum": nn.BatchNorm1d(6, momentum=1.0),
        "twice": Twice(momentum),
        "sometimes": Sometimes(momentum),
    }
    middle = kinds[kind.removesuffix(" cumulative").replace("cumulative", "plain")]
    blocks = nn.Sequential(nn.Linear(6, 6), middle, nn.ReLU())
    return nn.Sequential(
        nn.Linear(5, 6), blocks, plain if middle is not plain else nn.Identity(), nn.Linear(6, 2)
    )


KINDS = ("plain", "frozen", "without statistics", "one momentum", "twice", "sometimes", "cumulative",
         "twice cumulative", "sometimes cumulative")  # fmt: skip


def start(model: nn.Module, kind: str) -> nn.Module:
    model.train()
    if kind == "frozen":
        model[1][1].eval()  # type: ignore[index]
        model[1][1].running_mean.fill_(0.1)  # type: ignore[index]
    return model


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.targets)


def plain_training(kind: str) -> dict[str, Tensor]:
    """Return parameters and buffers after plain PyTorch's gradient accumulation on one device."""
    model = start(make_model(kind).double(), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            (loss_of(model, make_batch(10 * step + number, 0)) / MICRO_BATCHES).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train(rank: int, world_size: int, name: str, kind: str, way: str = "") -> dict[str, Tensor]:
    model = make_model(kind)
    blocks = [child for child in model.children() if isinstance(child, nn.Sequential)]
    if way == "checkpointed":
        checkpoint_activations(blocks, "blocks")
    if way == "compiled":
        for block in blocks:
            block.compile(backend="aot_eager")
    strategy = place(rank, world_size, name, model)
    start(model, kind)
    optimizer = torch.optim.SGD(strategy.optimized().values(), lr=0.1, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [_of_step(step, batch) for batch in slots(rank, world_size)]
        strategy.accumulate(own, PlainForward(loss_of))
        optimizer.step()
        strategy.weights_changed()
    return {name: value.clone() for name, value in model.named_buffers()}


def _of_step(step: int, batch: Any) -> Any:
    return make_batch(10 * step + batch.number, batch.weight)


def train_all(rank: int, world_size: int) -> dict[tuple[str, str, str], dict[str, Tensor]]:
    ways = [("ddp", kind, "") for kind in KINDS]
    ways += [(name, "twice cumulative", "") for name in NAMES]
    ways += [(name, "twice", way) for name in ("ddp", "fsdp") for way in ("checkpointed", "compiled")]
    return {way: train(rank, world_size, *way) for way in ways}


def assert_equals_plain_training(ranks: list[dict[tuple[str, str, str], dict[str, Tensor]]]) -> None:
    expected = {kind: plain_training(kind) for kind in KINDS}
    for rank in ranks:
        for (name, kind, way), buffers in rank.items():
            assert buffers or kind == "without statistics"
            for key, value in buffers.items():
                torch.testing.assert_close(
                    value, expected[kind][key], rtol=1e-12, atol=1e-12,
                    msg=lambda m, words=(name, kind, way, key): f"{words}: {m}",
                )  # fmt: skip


def test_one_rank_trains_with_the_statistics_of_plain_pytorch() -> None:
    assert_equals_plain_training([{("ddp", kind, ""): train(0, 1, "ddp", kind) for kind in KINDS}])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_ranks_have_the_statistics_of_plain_pytorch(world_size: int, tmp_path: Path) -> None:
    """Three ranks share four micro-batches: two have a spare slot, which must not count."""
    assert_equals_plain_training(run_ranks(world_size, train_all, folder=tmp_path))


def test_no_forward_sees_another_micro_batchs_statistics() -> None:
    """So that an overflow in one is gone with its row, and a fresh start is the same as a resume."""
    model = nn.BatchNorm1d(2).double()
    model.running_mean.fill_(5.0)  # type: ignore[union-attr]
    statistics = RunningStatistics(model, data_rank=0, data_ranks=1)
    with statistics.step(2):
        for slot in range(2):
            with statistics.micro_batch(slot, is_spare=False):
                assert not model.running_mean.any()  # type: ignore[union-attr]
                model(torch.randn(4, 2, dtype=torch.float64))
    assert model.num_batches_tracked == 2
    assert (model.running_mean > 3).all()  # type: ignore[operator]


def test_neighbours_that_share_micro_batches_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two by two with the same micro-batches; the other pair's layer ran in its last one only."""

    def gather(calls: Tensor, own: Tensor, group: object) -> None:
        calls.copy_(torch.tensor([*own, *own, 0, 2, 0, 2]))

    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(dist, "all_reduce", lambda added, group: None)
    model = nn.BatchNorm1d(2, momentum=0.1).double()
    statistics = RunningStatistics(model, data_rank=0, data_ranks=2)
    own = []
    with statistics.step(2):
        for slot in range(2):
            with statistics.micro_batch(slot, is_spare=False):
                model(torch.randn(4, 2, dtype=torch.float64))
                own.append(model.running_mean.clone())  # type: ignore[union-attr,operator]
    # Calls in order: 1 (own), 0, 1 (own), 2. Three follow the first of the own ones, two the second.
    torch.testing.assert_close(model.running_mean, 0.9**3 * own[0] + 0.9**2 * own[1])
    assert model.num_batches_tracked == 4


class Renorm(nn.BatchNorm1d):
    """Reads its running statistics in training (batch renormalisation)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.running_mean


def test_a_layer_with_a_forward_of_its_own_is_treated_as_any_module_with_buffers() -> None:
    assert not only_updates_statistics(Renorm(2))
    assert Buffers(Renorm(2)).tensors(all_persistent=False)
    for layer in (nn.BatchNorm2d(2), nn.SyncBatchNorm(2), BatchNormAct2d(2)):
        assert only_updates_statistics(layer)
        assert not Buffers(layer).tensors(all_persistent=False)
