from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler import CosineLRScheduler
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ScheduleConfig
from hpc_train.experiment.topology import learning_rate
from hpc_train.experiment.validate.optimizer_rules import schedule_is_known
from hpc_train.training.optimization import make_schedule
from tests.run.runs import small_experiment

TOTAL, PER_EPOCH = 60, 10


def factors(total: int = TOTAL, **keys: Any) -> list[float]:
    schedule = make_schedule(ScheduleConfig(**keys), total, PER_EPOCH)
    return [schedule(step) for step in range(total)]


def torch_factors(kind: type[Any], total: int = TOTAL, **keys: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = kind(optimizer, **keys)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def of(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


@pytest.mark.parametrize(
    ("keys", "kind", "same"),
    [
        ({"name": "cosine"}, CosineAnnealingLR, {"T_max": 60}),
        (
            {"name": "cosine", "min_factor": 0.1},
            CosineAnnealingLR,
            {"T_max": 60, "eta_min": 0.1},
        ),
        (
            {"name": "linear", "min_factor": 0.25},
            lr_scheduler.LinearLR,
            {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 60},
        ),
        (of("poly", power=2.0), lr_scheduler.PolynomialLR, {"total_iters": 60, "power": 2.0}),
        (of("step", every_epochs=2, gamma=0.5), lr_scheduler.StepLR, {"step_size": 20, "gamma": 0.5}),
        (of("step", every_steps=7), lr_scheduler.StepLR, {"step_size": 7}),
        (
            of("multistep", milestones_epochs=[4, 2], gamma=0.2),
            lr_scheduler.MultiStepLR,
            {"milestones": [20, 40], "gamma": 0.2},
        ),
        (of("multistep", milestones_steps=[5, 30]), lr_scheduler.MultiStepLR, {"milestones": [5, 30]}),
        (of("exponential", gamma=0.5), lr_scheduler.ExponentialLR, {"gamma": 0.5 ** (1 / 10)}),
    ],
)
def test_factors_are_those_of_torchs_scheduler(keys: Any, kind: type[Any], same: Any) -> None:
    assert factors(**keys) == pytest.approx(torch_factors(kind, **same), rel=1e-9, abs=1e-12)


def test_warm_up_and_cosine_are_timms_with_warmup_prefix() -> None:
    ours = factors(name="cosine", warmup_steps=6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = CosineLRScheduler(optimizer, 54, warmup_t=6, warmup_prefix=True, t_in_epochs=False)
    timms = []
    for step in range(TOTAL):
        scheduler.step_update(step)
        timms.append(optimizer.param_groups[0]["lr"])
    assert ours[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert ours[6:] == pytest.approx(timms[6:])


def test_warm_up_in_epochs_may_be_a_part_of_one() -> None:
    assert factors(name="constant", warmup_epochs=0.4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_a_part_of_an_epoch_ends_at_its_step() -> None:
    """1.1 · 100 is 110.00000000000001 in floating point."""
    for keys in (of("step", every_epochs=1.1), of("multistep", milestones_epochs=[1.1])):
        schedule = make_schedule(ScheduleConfig(**keys), 300, 100)
        assert (schedule(109), schedule(110)) == pytest.approx((1.0, 0.1))


@given(
    name=st.sampled_from(["constant", "cosine", "linear", "poly"]),
    total=st.integers(2, 500),
    warmup=st.integers(0, 400),
    least=st.floats(0, 1),
)
def test_factors_stay_between_the_minimum_and_one(name: str, total: int, warmup: int, least: float) -> None:
    warmup = min(warmup, total - 1)
    found = factors(total, name=name, warmup_steps=warmup, min_factor=least)
    assert max(found) <= 1 + 1e-12
    assert min(found[warmup:]) >= least - 1e-12


def test_a_schedule_is_a_function_of_the_step() -> None:
    for name in ("cosine", "linear", "poly"):
        schedule = make_schedule(ScheduleConfig(name=name, warmup_steps=3), TOTAL, PER_EPOCH)
        late = schedule(50)
        assert schedule(4) > late == schedule(50)
    found = factors(name="multistep", warmup_steps=10, args={"milestones_epochs": [2]})
    assert (found[19], found[20]) == pytest.approx((1.0, 0.1)), "counted from the run's beginning"
    assert min(factors(name="exponential", min_factor=0.3, args={"gamma": 0.1})) == 0.3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "timm/cosine"}, "there is no schedule 'timm/cosine'; did you mean cosine"),
        ({"name": "cosine", "args": {"power": 2}}, "cosine takes no argument 'power'; take it out"),
        ({"name": "poly", "args": {"powr": 2}}, "no argument 'powr'; did you mean 'power'"),
        ({"name": "poly", "args": {"power": "2"}}, "args.power: needs a number above 0, got .* '2'; write"),
        ({"name": "step", "args": {"every_epochs": 1, "every_steps": 2}}, "every_steps: can't be combined"),
        ({"name": "cosine", "warmup_steps": 60}, "schedule.warmup_steps: .* of 60 steps is not shorter than"),
        ({"name": "cosine", "warmup_epochs": 6}, "schedule.warmup_epochs: .* of 60 steps is not shorter"),
    ],
)
def test_mistakes_are_named_with_their_key(keys: Any, message: str) -> None:
    with pytest.raises(BadFileError, match=rf"^optimization\..*{message}"):
        factors(**keys)


def test_a_new_schedule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is then accepted by ``validate``, and its arguments are checked where the run begins."""
    experiment = small_experiment()
    schedule = ScheduleConfig(name="square", args={"power": 2.0})
    optimization = experiment.optimization.model_copy(update={"schedule": schedule})
    changed = experiment.model_copy(update={"optimization": optimization})
    problem = schedule_is_known(changed)
    assert problem is not None and problem.message == "there is no schedule 'square'"

    def square(arguments: learning_rate.ScheduleArguments) -> Callable[[float], float]:
        power = arguments.number("power")
        return lambda x: float((1 - x) ** power)

    monkeypatch.setitem(learning_rate.OVER_SPAN, "square", square)
    assert schedule_is_known(changed) is None
    assert factors(name="square", args={"power": 2.0}) == factors(name="poly", args={"power": 2.0})
    with pytest.raises(BadFileError, match="square takes no argument 'gamma'"):
        factors(name="square", args={"power": 2.0, "gamma": 0.1})
