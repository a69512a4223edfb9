"""The average of the weights, against torch's own, on one rank and on two, and through checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.train_state import Ema
from tests.checkpoint.checkpoint_runs import OddModel, Trainee, begin_attempt, differences, make_run, whole
from tests.ranks import run_ranks

DECAY = 0.9
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2")


def state_of(trainee: Trainee, ema: Ema) -> TrainingState:
    return replace(trainee.state, averages=ema.averages)


def train(trainee: Trainee, ema: Ema, steps: int) -> None:
    for _ in range(steps):
        trainee.train(1)
        if trainee.rank:  # each rank's statistics are of its own micro-batches
            trainee.model.norm.running_mean += trainee.rank  # type: ignore[operator]
        ema.update()


def averages_of(ema: Ema) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in ema.averages.items()}


def evaluation_of(trainee: Trainee) -> Tensor:
    """Return the loss of an evaluation, which under FSDP leaves parameters gathered."""
    return _loss(trainee.wrapped)


@torch.no_grad()
def _loss(model: torch.nn.Module) -> Tensor:
    model.eval()
    loss: Tensor = model(torch.linspace(-1, 1, 20).reshape(4, 5))
    model.train()
    return loss


def test_the_average_is_torchs() -> None:
    trainee = Trainee()
    ema = Ema(trainee.model, DECAY)
    torchs = AveragedModel(trainee.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    torchs.update_parameters(trainee.model)  # its first one is a copy
    for _ in range(5):
        trainee.train(1)
        ema.update()
        torchs.update_parameters(trainee.model)
    expected, now = torchs.module.state_dict(), trainee.model.state_dict()
    assert expected.keys() - ema.averages.keys() == {"tied_b.weight"}
    for name, average in ema.averages.items():
        if average.is_floating_point():
            torch.testing.assert_close(average, expected[name], msg=name)
        else:
            assert torch.equal(average, now[name]), name
    assert int(ema.averages["norm.num_batches_tracked"]) == 5
    assert not torch.equal(ema.averages["norm.running_mean"], now["norm.running_mean"])


def test_swapped_the_model_is_the_average_and_afterwards_itself_bitwise() -> None:
    trainee = Trainee()
    ema = Ema(trainee.model, DECAY)
    train(trainee, ema, 3)
    before, averages, loss = trainee.everything(), averages_of(ema), evaluation_of(trainee)
    average = OddModel()
    average.load_state_dict(averages | {"tied_b.weight": averages["tied_a.weight"]})
    with pytest.raises(KeyboardInterrupt), ema.swapped():
        swapped = evaluation_of(trainee)
        raise KeyboardInterrupt
    torch.testing.assert_close(swapped, _loss(average), rtol=1e-6, atol=0)
    assert not torch.isclose(swapped, loss, rtol=1e-4)
    assert differences(before, trainee.everything()) == []
    assert differences(averages, averages_of(ema)) == []


def test_a_checkpoint_brings_the_average_back_and_is_refused_without(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    trainee = Trainee()
    ema = Ema(trainee.model, DECAY)
    train(trainee, ema, 2)
    trainee.checkpointer(run).save(state_of(trainee, ema), 2, {})
    other = Trainee(seed=1)
    others = Ema(other.model, DECAY)
    with pytest.raises(BadFileError, match=r"^optimization\.ema: the checkpoint has an average .* file none"):
        other.checkpointer(run).load_newest(other.state)
    other.checkpointer(run).load_newest(state_of(other, others))
    assert differences(averages_of(ema), averages_of(others)) == []
    trainee.checkpointer(run).save(trainee.state, 3, {})
    with pytest.raises(BadFileError, match=r"^optimization\.ema: the file has an average .* checkpoint none"):
        other.checkpointer(run).load_newest(state_of(other, others))
    wide = Trainee(width=9)
    narrow = replace(trainee.state, averages=Ema(wide.model, DECAY).averages)
    trainee.checkpointer(run).save(state_of(trainee, ema), 4, {})
    with pytest.raises(BadFileError, match=r"the average in the checkpoint is not this model's.*ema\.first"):
        trainee.checkpointer(run).load_newest(narrow)


def replace_mean(model: Any, inputs: Any) -> None:
    model.norm.running_mean = model.norm.running_mean + 1


def test_a_buffer_that_the_forward_replaces_is_followed_saved_and_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    trainee, other = Trainee(), Trainee(seed=1)
    ema, others = Ema(trainee.model, DECAY), Ema(other.model, DECAY)
    trainee.model.register_forward_pre_hook(replace_mean)
    other.model.register_forward_pre_hook(replace_mean)
    train(trainee, ema, 2)
    assert ema.averages["norm.running_mean"].mean() > 0.1
    trainee.checkpointer(run).save(state_of(trainee, ema), 2, {})
    train(other, others, 1)
    other.checkpointer(run).load_newest(state_of(other, others))
    for each, average in ((trainee, ema), (other, others)):
        train(each, average, 1)
    assert differences(averages_of(ema), averages_of(others)) == []
    assert differences(trainee.everything(), other.everything()) == []
    expected, average = trainee.model.norm.running_mean.clone(), ema.averages["norm.running_mean"].clone()
    with ema.swapped():
        evaluation_of(trainee)
    assert torch.equal(trainee.model.norm.running_mean, expected)
    assert torch.equal(ema.averages["norm.running_mean"], average + 1)


def average_on_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Follow, evaluate, save and resume under each strategy; return what differs from what it should be."""
    found = {}
    for strategy in STRATEGIES:
        trainee = Trainee(0, strategy, rank, world_size)
        ema = Ema(trainee.model, DECAY)
        found[strategy] = [
            *wrong_averages(trainee, ema), *wrong_evaluations(trainee, ema), *unshared_buffers(trainee, ema)
        ]  # fmt: skip
        found[f"{strategy} resumed"] = wrong_after_resume(trainee, ema, RunPaths(folder / strategy), strategy)
    return found


def wrong_averages(trainee: Trainee, ema: Ema) -> list[str]:
    """Follow three steps by arithmetic on whole tensors."""
    held = trainee.model.state_dict()
    expected = {name: whole(held[name]).clone() for name in ema.averages}
    for _ in range(3):
        train(trainee, ema, 1)
        for name, value in trainee.model.state_dict().items():
            if name in expected and value.is_floating_point():
                expected[name] = expected[name] * DECAY + whole(value) * (1 - DECAY)
            elif name in expected:
                expected[name] = whole(value)
    found = averages_of(ema)
    placed = [name for name, value in ema.averages.items() if type(value) is not type(held[name].detach())]
    return placed + [
        name for name, value in expected.items() if not torch.allclose(found[name], value, rtol=1e-5)
    ]


def wrong_evaluations(trainee: Trainee, ema: Ema) -> list[str]:
    """Evaluate the weights, their average, and the weights again."""
    before, averages = trainee.everything(), averages_of(ema)
    average = OddModel()
    average.load_state_dict(averages | {"tied_b.weight": averages["tied_a.weight"]})
    first = evaluation_of(trainee)
    with ema.swapped():
        swapped = evaluation_of(trainee)
    again = evaluation_of(trainee)
    wrong = differences(before, trainee.everything()) + differences(averages, averages_of(ema))
    wrong += [] if torch.equal(first, again) else [f"the weights: {first} and then {again}"]
    is_right = torch.allclose(swapped, _loss(average), rtol=1e-5)
    return wrong + ([] if is_right else [f"the average: {swapped}"])


def unshared_buffers(trainee: Trainee, ema: Ema) -> list[str]:
    """Rank 0's averages of buffers are the run's; what is shared before a save leaves them as they are."""
    before = averages_of(ema)
    ema.share_buffers(trainee.strategy)
    after = averages_of(ema)
    theirs = after["norm.running_mean"].clone()
    torch.distributed.broadcast(theirs, src=0)
    changed = [] if trainee.rank == 0 else ["norm.running_mean"]
    is_shared = torch.equal(theirs, after["norm.running_mean"])
    return [] if is_shared and differences(before, after) == changed else ["averages of buffers"]


def wrong_after_resume(trainee: Trainee, ema: Ema, run: RunPaths, strategy: str) -> list[str]:
    """Save, load under every strategy, and train one more step under the same."""
    trainee.strategy.share_buffers(all_persistent=True)
    trainee.checkpointer(run).save(state_of(trainee, ema), 3, {})
    saved = averages_of(ema)
    wrong = []
    for attempt, name in enumerate((*sorted(set(STRATEGIES) - {strategy}), strategy), start=2):
        other = Trainee(5, name, trainee.rank, trainee.world_size)
        others = Ema(other.model, DECAY)
        if trainee.rank == 0:
            begin_attempt(run, attempt)
        torch.distributed.barrier()
        other.checkpointer(run, attempt).load_newest(state_of(other, others))
        wrong += differences(saved, averages_of(others))
    train(trainee, ema, 1)
    train(other, others, 1)
    return wrong + differences(averages_of(ema), averages_of(others))


@pytest.mark.slow
def test_on_two_ranks_it_is_sharded_as_the_model_and_resumes_bitwise(tmp_path: Path) -> None:
    for strategy in STRATEGIES:
        make_run(tmp_path / strategy)
    found = run_ranks(2, average_on_ranks, tmp_path, folder=tmp_path)
    assert found == [{key: [] for name in STRATEGIES for key in (name, f"{name} resumed")}] * 2
