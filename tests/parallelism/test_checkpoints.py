"""A checkpoint of any strategy loads under any other: bitwise the same full tensors."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.checkpoint_runs import begin_attempt, differences, saving_group
from tests.parallelism.cases import ADAMW, RESNET, STRATEGIES, VIT, Case, Choice, Shape
from tests.parallelism.groups import Groups
from tests.parallelism.training import Trainee, whole

pytestmark = pytest.mark.slow

STEPS = 3
RANKS = 2


#: Those that BatchNorm's buffers are tried with; ranks share no layer of such a model.
WITH_BUFFERS = ("ddp", "fsdp", "zero1", "pipeline")


def case_of(strategy: str, model: str = RESNET) -> Case:
    overrides = (model, ADAMW, "optimization.ema={decay: 0.9}", "precision=fp64")
    return Case(
        strategy, Shape(RANKS, 4), tuple(Choice(each.partition("=")[0], (each,)) for each in overrides)
    )


def everything(trainee: Trainee) -> dict[str, Tensor]:
    """Return weights, buffers, averages and the optimizer's state, whole. Collective."""
    train_state = trainee.train_state
    optimizer, likes = {}, {}
    for name, parameter in train_state.strategy.optimized().items():
        for key, value in train_state.optimization.optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                optimizer[f"optimizer.{name}.{key}"], likes[f"optimizer.{name}.{key}"] = value, parameter
    averages = {f"ema.{name}": value for name, value in trainee.average().items()}
    return trainee.weights() | averages | whole(train_state.strategy, optimizer, likes)


def trained(rank: int, ranks: int, case: Case) -> Trainee:
    trainee = Trainee(case.experiment, rank, ranks)
    trainee.train_state.wrapped.train()
    for step in range(STEPS):
        trainee.step(step)
    return trainee


def save(rank: int, ranks: int, case: Case, folder: Path) -> dict[str, Tensor]:
    trainee = trained(rank, ranks, case)
    found = everything(trainee)
    checkpointer(trainee, rank, ranks, folder).save(trainee.train_state.state, STEPS, {})
    return found


def load(
    rank: int, ranks: int, case: Case, folder: Path, continues: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what came back, and, if it ``continues``, what one more step made of it."""
    trainee = Trainee(case.experiment, rank, ranks)
    trainee.train_state.wrapped.train()
    loaded = checkpointer(trainee, rank, ranks, folder).load_newest(trainee.train_state.state)
    assert loaded is not None and loaded.step == STEPS
    found = everything(trainee)
    if not continues:
        return found, {}
    trainee.step(STEPS)
    return found, everything(trainee)


def checkpointer(trainee: Trainee, rank: int, ranks: int, folder: Path) -> Checkpointer:
    strategy = trainee.train_state.strategy
    return Checkpointer(RunPaths(folder), 1, strategy, rank, ranks, saving_group())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "strategies"), [(VIT, STRATEGIES), (RESNET, WITH_BUFFERS)], ids=["vit", "resnet"]
)
def test_a_checkpoint_of_any_strategy_loads_under_any_other(
    model: str, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    with closing(Groups()) as groups:
        for saved_under in strategies:
            folder = tmp_path / saved_under
            begin_attempt(RunPaths(folder), 1)
            saved, _ = groups.run(RANKS, save, case_of(saved_under, model), folder)
            assert any(name.startswith("optimizer.") for name in saved)
            assert any(name.startswith("ema.") for name in saved)
            steps = {}
            for loaded_under in strategies:
                other = case_of(loaded_under, model)
                # Other weights before the load than those that were trained.
                seeded = replace(other, choices=(*other.choices, Choice("seed", ("seed=11",))))
                # What came back is bitwise the same: to go on from one of them is enough.
                continues = saved_under == strategies[0]
                for found, after in groups.run(RANKS, load, seeded, folder, continues):
                    assert differences(found, saved) == [], f"{saved_under} under {loaded_under}"
                    steps[loaded_under] = after
            # Each continues as the others do, except for rounding. BatchNorm's statistics are those of
            # the first data-parallel rank's micro-batches, all of them where it is the only one.
            for name, value in steps["ddp"].items():
                for strategy, after in steps.items():
                    is_statistic = ".running_" in name or name.endswith(".num_batches_tracked")
                    if is_statistic and case_of(strategy, model).data_ranks == 1:
                        continue
                    torch.testing.assert_close(
                        after[name], value, rtol=0, atol=1e-9, msg=f"{strategy}: {name}"
                    )


def test_what_is_compared_does_differ(tmp_path: Path) -> None:
    other = case_of("ddp")
    seeded = replace(other, choices=(*other.choices, Choice("seed", ("seed=11",))))
    begin_attempt(RunPaths(tmp_path), 1)
    with closing(Groups()) as groups:
        saved, _ = groups.run(RANKS, save, other, tmp_path)
        fresh, _ = groups.run(RANKS, without_a_load, seeded)
    assert len(differences(fresh, saved)) > 20


def without_a_load(rank: int, ranks: int, case: Case) -> dict[str, Tensor]:
    return everything(trained(rank, ranks, case))
