"""Which optimizers work on shards: each of torch's and timm's either trains as under ddp, or is refused."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from timm import optim
from torch import Tensor, nn

from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.validate.compatibility import NEED_WHOLE_PARAMETERS
from hpc_train.experiment.validate.optimizer_rules import TORCH_OPTIMIZERS, UNUSABLE_OPTIMIZERS
from hpc_train.training.checkpoint.state import optimizer_tensors
from hpc_train.training.datasets.types import Batch
from tests.forwards import PlainForward, make_train_state, optimizer_step
from tests.rank_context import make_strategy
from tests.ranks import run_ranks
from tests.strategies.test_data_parallel import full

CPU = torch.device("cpu")
#: bitsandbytes and apex are not installed; muon's matrices-only form is in torch's own tests.
NAMES = [
    *(name for name in TORCH_OPTIMIZERS if name != "muon"),
    *(
        f"timm/{name}"
        for name in optim.list_optimizers()
        if name not in UNUSABLE_OPTIMIZERS and not name.startswith(("bnb", "fused"))
    ),
]
#: They iterate in bfloat16, in which another order of additions shows.
BFLOAT16 = ("timm/muon", "timm/nmuon")


def chosen() -> list[str]:
    """All names for `make test-full`; else some, of which a few are refused."""
    if os.environ.get("HPC_TRAIN_ALL_PARALLEL"):
        return NAMES
    return ["adafactor", "timm/sgdp", "timm/novograd", *Random(5).sample(NAMES, 9)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def trained(rank: int, world_size: int, name: str, strategy_name: str) -> dict[str, Tensor]:
    degrees = Degrees(replicate=world_size) if strategy_name == "ddp" else Degrees(shard=world_size)
    strategy = make_strategy(strategy_name, rank, degrees)
    torch.manual_seed(0)
    model = Net()
    optimization = make_train_state(strategy, model, [], OptimizerConfig(name=name, lr=0.01), 4).optimization
    for step in range(3):
        inputs = torch.randn(
            2, 4, generator=torch.Generator().manual_seed(3 * step + rank), dtype=torch.float64
        )
        batch = Batch(step, rank, 1 / world_size, inputs, inputs, torch.ones(2, dtype=torch.bool))
        strategy.accumulate(
            [batch], PlainForward(lambda net, each: net(each.inputs).square().mean(), optimization.scale)
        )
        optimizer_step(optimization)
        strategy.weights_changed()
    optimizer_tensors(optimization.optimizer, {id(value): key for key, value in strategy.optimized().items()})
    return {key: full(value).detach().clone() for key, value in model.named_parameters()}


def all_trained(rank: int, world_size: int, names: list[str]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name in names:
        for strategy in ("ddp", "fsdp", "zero1"):
            try:
                found[name, strategy] = trained(rank, world_size, name, strategy)
            except Exception as error:
                found[name, strategy] = repr(error)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_optimizer_trains_on_shards_as_on_whole_parameters_or_is_refused(tmp_path: Path) -> None:
    names = chosen()
    found = run_ranks(2, all_trained, names, folder=tmp_path)[0]
    for name in names:
        for strategy in ("fsdp", "zero1"):
            if name.rpartition("/")[2] in NEED_WHOLE_PARAMETERS:
                assert isinstance(found[name, strategy], str), f"{name} works under {strategy} by now"
            elif name not in BFLOAT16:
                torch.testing.assert_close(
                    found[name, strategy], found[name, "ddp"], rtol=1e-9, atol=1e-9, msg=f"{name}, {strategy}"
                )
