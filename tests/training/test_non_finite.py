"""What one rank makes of a loss or gradient that is NaN or infinite; all ranks decide alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_train.errors import ExitCode, NonFiniteError
from hpc_train.experiment.config.training_sections import OptimizationConfig
from hpc_train.run.spikes import WARM_UP, Reaction, Spike, SpikeRule
from hpc_train.training.non_finite import Guard, check_evaluation, check_rollbacks
from tests.experiments import tiny_experiment
from tests.ranks import run_ranks

NAN, FINE = torch.tensor(math.nan), torch.tensor(1.0)


def config(policy: str, most: int = 2) -> OptimizationConfig:
    return tiny_experiment({"on_non_finite": policy, "max_non_finite": most}).optimization


def test_stop_only_remembers() -> None:
    guard = Guard(config("stop"), nn.Linear(1, 1), norm_counts=True)
    assert guard.allows(FINE, NAN) and not guard.has_seen, "an unclipped gradient is not looked at"
    assert guard.allows(NAN, None)
    assert guard.has_seen and not guard.needs_norm
    assert NonFiniteError.exit_code == ExitCode.NO_RETRY


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_others_refuse_the_step(policy: str) -> None:
    guard = Guard(config(policy), nn.Linear(1, 1), norm_counts=True)
    assert guard.needs_norm
    assert guard.allows(FINE, FINE) and guard.allows(FINE, None)
    assert not guard.allows(NAN, FINE)
    assert not guard.allows(FINE, torch.tensor(math.inf))
    assert not guard.has_seen
    under_fp16 = Guard(config(policy), nn.Linear(1, 1), norm_counts=False)
    assert under_fp16.allows(FINE, NAN) and not under_fp16.needs_norm, "the loss scale takes care of it"


def test_a_skip_puts_the_statistics_back_and_is_counted() -> None:
    model = nn.BatchNorm1d(2)
    guard = Guard(config("skip"), model, norm_counts=True, skips=1)
    guard.before_step()
    model.running_var = torch.full((2,), math.nan)  # as many models of one's own do it
    model(torch.full((4, 2), math.nan))
    assert model.running_mean is not None and model.running_mean.isnan().all()
    guard.after_skip(7)
    assert model.running_mean.tolist() == [0.0, 0.0] and guard.skips == 2
    assert model.running_var.tolist() == [1.0, 1.0]
    with pytest.raises(NonFiniteError, match=r"at step 9, .*max_non_finite allows 2"):
        guard.after_skip(9)


def test_clipping_by_no_bound_yields_the_norm_and_changes_nothing() -> None:
    layer = nn.Linear(3, 1)
    layer(torch.ones(1, 3)).sum().backward()
    before = layer.weight.grad.clone()  # type: ignore[union-attr]
    guard = Guard(config("skip"), layer, norm_counts=True)
    norm = guard.clip(lambda most: nn.utils.clip_grad_norm_(layer.parameters(), most), None)
    assert norm is not None and norm.item() == 2.0
    assert torch.equal(before, layer.weight.grad)  # type: ignore[arg-type]
    assert Guard(config("stop"), layer, norm_counts=True).clip(lambda most: FINE, None) is None


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(
    ("on_spike", "on_non_finite"), [("skip", "stop"), ("rollback", "skip"), ("skip", "rollback")]
)
def test_a_spike_is_refused_and_handled_by_its_own_key(on_spike: str, on_non_finite: str) -> None:
    rule, recorded = SpikeRule(), []

    def record(spike: Spike, reaction: Reaction) -> Spike:
        recorded.append((spike.step, reaction))
        return spike

    for _ in range(WARM_UP):
        rule.add(1.0, 1.0)
    keys = {"on_spike": on_spike, "on_non_finite": on_non_finite, "max_non_finite": 1}
    model = nn.BatchNorm1d(2)
    guard = Guard(tiny_experiment(keys).optimization, model, norm_counts=True, rule=rule, record=record)
    guard.before_step()
    assert guard.needs_norm and guard.allows(FINE, FINE, 5)
    assert not guard.allows(FINE * 2, FINE, 6) and guard.reaction == on_spike and recorded == [(7, on_spike)]
    if on_spike == "skip":
        model(torch.full((4, 2), 3.0))
        guard.after_skip(7)
        assert model.running_mean is not None and model.running_mean.tolist() == [0.0, 0.0]
        assert guard.skips == 0, "spikes have no maximum"
    assert guard.allows(NAN, FINE, 7) == (on_non_finite == "stop")
    assert guard.has_seen == (on_non_finite == "stop")
    assert guard.spike is None and (on_non_finite == "stop" or guard.reaction == on_non_finite)
    assert guard.allows(FINE, FINE, 8) and guard.spike is None and len(recorded) == 1


def on_rank(rank: int, world_size: int) -> list[bool]:
    guard = Guard(config("skip"), nn.Linear(1, 1), norm_counts=True)
    return [guard.allows(NAN if rank == 1 else FINE, FINE), guard.allows(FINE, FINE)]


@pytest.mark.slow
def test_one_rank_is_enough(tmp_path: Path) -> None:
    assert run_ranks(2, on_rank, folder=tmp_path) == [[False, True]] * 2


def test_an_evaluation_and_too_many_rollbacks_end_the_run() -> None:
    check_evaluation(3, {"loss": 1.0, "accuracy": 0.5})
    check_evaluation(3, {"accuracy": math.nan})
    with pytest.raises(NonFiniteError, match="the val loss is nan at step 3; lower"):
        check_evaluation(3, {"loss": math.nan})
    check_rollbacks((3, 9), config("rollback"))
    with pytest.raises(NonFiniteError, match=r"a spike 3 times; .* allows 2 rollbacks"):
        check_rollbacks((3, 9, 12), config("rollback"))
