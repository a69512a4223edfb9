"""The learning rate over the steps, as a factor of its peak: a pure function, so that no state is saved.

``train_state`` creates it; ``optimization`` calls it with the number of the next step, counted from 0.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from hpc_train.config.problems import unknown_argument
from hpc_train.config.training_sections import ScheduleConfig
from hpc_train.errors import BadFileError
from hpc_train.registry import split_name
from hpc_train.topology.batch_arithmetic import count_warmup_steps, too_long_warmup
from hpc_train.topology.learning_rate import (
    ARGS,
    OVER_SPAN,
    OVER_STEPS,
    Schedule,
    ScheduleArguments,
)
from hpc_train.validate.part_rules import problem_of_schedule_name

_KEY = "optimization.schedule"


def make_schedule(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Return the factor of each of ``total_steps`` steps: linear warm-up, then the schedule of ``config``.

    Warm-up is (step + 1) / warmup_steps. Schedules of ``OVER_SPAN``, timm and torch run over the steps after
    it; schedules of ``OVER_STEPS`` count from the start of the run, so that "epoch 30" is the run's. Raises
    BadFileError.
    """
    if problem := problem_of_schedule_name(config.name, _foreign_names):
        raise problem.as_error()
    warmup = _warmup_steps(config, total_steps, steps_per_epoch)
    provider, name = split_name(config.name)
    span = total_steps - warmup
    if name:
        if provider == "timm":
            after = _timm(name, config, span, has_warmup=warmup > 0)
        else:
            after = _torch(name, config, span)
        return _warmed_up(warmup, lambda step: max(config.min_factor, after(step - warmup)))
    arguments = ScheduleArguments(config, steps_per_epoch)
    if provider in OVER_SPAN:
        shape = OVER_SPAN[provider](arguments)
        floor = config.min_factor
        after = _warmed_up(warmup, lambda step: floor + (1 - floor) * shape((step - warmup) / span))
    else:
        decay = OVER_STEPS[provider](arguments)
        after = _warmed_up(warmup, lambda step: max(config.min_factor, decay(step)))
    arguments.refuse_unused()
    return after


def _warmup_steps(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> int:
    steps = count_warmup_steps(config, steps_per_epoch)
    if total_steps > 0 and (problem := too_long_warmup(config, steps, total_steps)):
        raise problem.as_error()
    return steps


def _warmed_up(warmup: int, after: Schedule) -> Schedule:
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


def _foreign_names(provider: str) -> list[str]:
    if provider == "timm":
        return sorted(_timm_classes())
    return [name for name in torch.optim.lr_scheduler.__all__ if name != "LRScheduler"]


def _timm_classes() -> dict[str, Any]:
    from timm import scheduler as timm_scheduler

    return {
        kind.removesuffix("LRScheduler").lower(): getattr(timm_scheduler, kind)
        for kind in dir(timm_scheduler)
        if kind.endswith("LRScheduler") and kind != "PlateauLRScheduler"
    }


def _dummy_optimizer() -> torch.optim.Optimizer:
    """Return an optimizer with learning rate 1, so that a scheduler sets a factor."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def _timm(name: str, config: ScheduleConfig, span: int, *, has_warmup: bool) -> Schedule:
    """Return timm's scheduler, already a function of the update number; rates in ``args`` are factors."""
    if has_warmup and "warmup_t" in config.args:
        raise BadFileError(f"{_KEY}.args: warmup_t and {_KEY}.warmup_… both warm up; write one of them")
    kind = _timm_classes()[name.lower()]
    taken = inspect.signature(kind).parameters
    defaults = {"t_initial": span, "lr_min": config.min_factor}
    arguments = {key: value for key, value in defaults.items() if key in taken} | config.args
    optimizer = _dummy_optimizer()
    scheduler = _construct(config, kind, optimizer, arguments | {"t_in_epochs": False})

    def factor(step: int) -> float:
        scheduler.step_update(step)
        return float(optimizer.param_groups[0]["lr"])

    return factor


def _torch(name: str, config: ScheduleConfig, span: int) -> Schedule:
    """Return torch's scheduler, replayed from step 0 and cached; rates in ``args`` are factors."""
    kind: Any = getattr(torch.optim.lr_scheduler, name)
    taken = inspect.signature(kind).parameters
    if "cycle_momentum" in taken and config.args.get("cycle_momentum") is not False:
        raise BadFileError(f"{_KEY}.args: {name} changes momentum too; write cycle_momentum: false")
    defaults = {"T_max": span, "total_steps": span, "max_lr": 1.0}
    by_epochs = {"epochs", "steps_per_epoch"} & config.args.keys()
    arguments = {key: v for key, v in defaults.items() if key in taken and not by_epochs} | config.args
    _refuse_short(name, arguments, span)
    optimizer = _dummy_optimizer()
    scheduler = _construct(config, kind, optimizer, arguments)
    values = [float(optimizer.param_groups[0]["lr"])]

    def factor(step: int) -> float:
        while len(values) <= step:
            optimizer.step()  # without gradients; a scheduler ahead of its optimizer warns
            scheduler.step()
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values[step]

    return factor


def _refuse_short(name: str, arguments: dict[str, Any], span: int) -> None:
    """Raise BadFileError if OneCycleLR would raise in the middle of the run."""
    if name != "OneCycleLR":
        return
    total = arguments.get("total_steps") or arguments.get("epochs", 0) * arguments.get("steps_per_epoch", 0)
    if total < span:
        raise BadFileError(f"{_KEY}.args: OneCycleLR ends at step {total} of {span}; omit total_steps")


def _construct(
    config: ScheduleConfig, kind: Any, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]
) -> Any:
    """Construct the scheduler; errors about its arguments become BadFileError."""
    internal = {"self", "optimizer", "last_epoch", "t_in_epochs", "initialize"}
    accepted = sorted(inspect.signature(kind).parameters.keys() - internal)
    for name in config.args.keys() - set(accepted):
        raise unknown_argument(ARGS, config.name, name, accepted).as_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(optimizer, **arguments)
    except (TypeError, ValueError, AssertionError, ZeroDivisionError, KeyError, AttributeError) as error:
        raise BadFileError(
            f"{_KEY}.args: {config.name} can't be made with {config.args}: {error}; fix them"
        ) from error
