"""The learning rate over the steps, as a factor of its peak: a pure function, so that no state is saved.

Called by ``engine.optimization`` with the number of the step that is about to be taken, from 0.
"""

from __future__ import annotations

import bisect
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hpc_train.config.training_sections import ScheduleConfig
from hpc_train.errors import BadFileError
from hpc_train.plan.batches import count_warmup_steps
from hpc_train.registry import nearest, split_name

#: Step → factor of the peak learning rate.
Schedule = Callable[[int], float]

_KEY = "optimization.schedule"


def make_schedule(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Return the factor of each of ``total_steps`` steps: linear warm-up, then what ``config`` names.

    Warm-up is (step + 1) / warmup_steps. cosine, linear and poly, and those of timm and torch, run over
    the steps after it; step, multistep and exponential count from the run's beginning, so that "epoch 30"
    means that. Raises BadFileError.
    """
    warmup = _warmup_steps(config, total_steps, steps_per_epoch)
    provider, name = split_name(config.name)
    span = total_steps - warmup
    if name:
        after = _foreign(provider, name, config, span, has_warmup=warmup > 0)
        return _warmed_up(warmup, lambda step: max(config.min_factor, after(step - warmup)))
    arguments = _Arguments(config, steps_per_epoch)
    if provider in _OVER_SPAN:
        shape = _OVER_SPAN[provider](arguments)
        floor = config.min_factor
        after = _warmed_up(warmup, lambda step: floor + (1 - floor) * shape((step - warmup) / span))
    elif provider in _OVER_STEPS:
        decay = _OVER_STEPS[provider](arguments)
        after = _warmed_up(warmup, lambda step: max(config.min_factor, decay(step)))
    else:
        raise _unknown_name(config.name, [*_OVER_SPAN, *_OVER_STEPS])
    arguments.refuse_unused()
    return after


def _warmup_steps(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> int:
    steps = count_warmup_steps(config, steps_per_epoch)
    if 0 < total_steps <= steps:
        key = "warmup_epochs" if config.warmup_steps is None else "warmup_steps"
        raise BadFileError(
            f"{_KEY}.{key}: a warm-up of {steps} steps fills the run, which has {total_steps}; "
            "write a shorter one, or train longer"
        )
    return steps


def _warmed_up(warmup: int, after: Schedule) -> Schedule:
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


class _Arguments:
    """Reads ``schedule.args``: every value checked, every unknown name refused."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: int) -> None:
        self._config = config
        self._steps_per_epoch = steps_per_epoch
        self._known: set[str] = set()

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number; ``default`` None: it must be there."""
        self._known.add(name)
        value = self._config.args.get(name, default)
        if value is None:
            raise self._error(f"{self._config.name} needs {name!r}; write a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._error(f"{name} is {value!r}; write a number above 0")
        return value

    def steps(self, name: str, default_epochs: float | None = None) -> float:
        """Return ``<name>_steps``, or ``<name>_epochs`` in steps; exactly one of them, or the default."""
        in_epochs, in_steps = f"{name}_epochs", f"{name}_steps"
        self._known |= {in_epochs, in_steps}
        self._one_of(in_epochs, in_steps, needed=default_epochs is None)
        if in_steps in self._config.args:
            return self.number(in_steps)
        return self.number(in_epochs, default_epochs) * self._steps_per_epoch

    def milestones(self) -> list[float]:
        """Return ``milestones_steps`` or ``milestones_epochs`` in steps, in order."""
        in_epochs, in_steps = "milestones_epochs", "milestones_steps"
        self._known |= {in_epochs, in_steps}
        name = self._one_of(in_epochs, in_steps, needed=True)
        values = self._config.args[name]
        if not isinstance(values, list) or not all(type(v) in (int, float) and v > 0 for v in values):
            raise self._error(f"{name} is {values!r}; write a list of numbers above 0")
        return sorted(v * (1 if name == in_steps else self._steps_per_epoch) for v in values)

    def refuse_unused(self) -> None:
        """Raise for the first name that the schedule did not ask for."""
        for name in self._config.args.keys() - self._known:
            raise self._error(_unknown_argument(self._config.name, name, sorted(self._known)))

    def _one_of(self, first: str, second: str, *, needed: bool) -> str:
        given = [name for name in (first, second) if name in self._config.args]
        if len(given) > 1 or (needed and not given):
            said = "both" if given else "neither"
            raise self._error(f"{self._config.name} takes {first} or {second} and has {said}; write one")
        return given[0] if given else first

    def _error(self, what: str) -> BadFileError:
        return BadFileError(f"{_KEY}.args: {what}")


def _unknown_argument(schedule: str, name: str, known: list[str]) -> str:
    hint = nearest(name, known)
    meant = (
        f"did you mean {hint!r}?" if hint else f"it takes {', '.join(known)}" if known else "it takes none"
    )
    return f"{schedule} takes no argument {name!r}; {meant}"


def _unknown_name(name: str, known: list[str]) -> BadFileError:
    hint = nearest(name, known)
    meant = f"did you mean {hint!r}?" if hint else f"known: {', '.join(known)}, timm/<name>, torch/<class>"
    return BadFileError(f"{_KEY}.name: there is no schedule {name!r}; {meant}")


# Of the part x in [0, 1) of the steps after the warm-up that is done, from 1 to 0.


def _cosine(arguments: _Arguments) -> Callable[[float], float]:
    # arXiv:1608.03983, eq. 5; torch's CosineAnnealingLR, timm's CosineLRScheduler with warmup_prefix.
    return lambda x: (1 + math.cos(math.pi * x)) / 2


def _linear(arguments: _Arguments) -> Callable[[float], float]:
    # torch's LinearLR from 1 to min_factor.
    return lambda x: 1 - x


def _poly(arguments: _Arguments) -> Callable[[float], float]:
    # torch's PolynomialLR, timm's PolyLRScheduler with warmup_prefix.
    power = arguments.number("power", 1.0)
    return lambda x: float((1 - x) ** power)


# Of the step, counted from the run's beginning.


def _constant(arguments: _Arguments) -> Schedule:
    return lambda step: 1.0


def _step(arguments: _Arguments) -> Schedule:
    # torch's StepLR, timm's StepLRScheduler without warmup_prefix.
    every, gamma = arguments.steps("every"), arguments.number("gamma", 0.1)
    return lambda step: float(gamma ** (step // every))


def _multistep(arguments: _Arguments) -> Schedule:
    # torch's MultiStepLR, timm's MultiStepLRScheduler without warmup_prefix.
    milestones, gamma = arguments.milestones(), arguments.number("gamma", 0.1)
    return lambda step: float(gamma ** bisect.bisect_right(milestones, step))


def _exponential(arguments: _Arguments) -> Schedule:
    # torch's ExponentialLR at whole epochs, smooth between them.
    every, gamma = arguments.steps("every", default_epochs=1), arguments.number("gamma")
    return lambda step: float(gamma ** (step / every))


_OVER_SPAN = {"cosine": _cosine, "linear": _linear, "poly": _poly}
_OVER_STEPS = {"constant": _constant, "step": _step, "multistep": _multistep, "exponential": _exponential}


def _foreign(provider: str, name: str, config: ScheduleConfig, span: int, *, has_warmup: bool) -> Schedule:
    """Return the schedule of timm or torch, of the steps after the warm-up."""
    if provider == "timm":
        return _timm(name, config, span, has_warmup=has_warmup)
    if provider == "torch":
        return _torch(name, config, span)
    raise BadFileError(f"{_KEY}.name: {config.name!r} is of {provider!r}; write timm/<name> or torch/<class>")


def _dummy_optimizer() -> torch.optim.Optimizer:
    """Return an optimizer of rate 1, so that what a scheduler sets is a factor."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def _timm(name: str, config: ScheduleConfig, span: int, *, has_warmup: bool) -> Schedule:
    """Return timm's scheduler, which is a function of the update already; rates in ``args`` are factors."""
    from timm import scheduler as timm_scheduler

    classes = {
        kind.removesuffix("LRScheduler").lower(): getattr(timm_scheduler, kind)
        for kind in dir(timm_scheduler)
        if kind.endswith("LRScheduler") and kind != "PlateauLRScheduler"
    }
    if name.lower() not in classes:
        raise _unknown_name(config.name, [f"timm/{known}" for known in sorted(classes)])
    if has_warmup and "warmup_t" in config.args:
        raise BadFileError(f"{_KEY}.args: warmup_t and {_KEY}.warmup_… both warm up; write one of them")
    kind = classes[name.lower()]
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
    """Return torch's scheduler, replayed from step 0 and remembered; rates in ``args`` are factors."""
    kind = _torch_class(name, config)
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
            optimizer.step()  # without gradients; a scheduler that runs ahead of its optimizer warns
            scheduler.step()
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values[step]

    return factor


def _torch_class(name: str, config: ScheduleConfig) -> Any:
    schedulers = torch.optim.lr_scheduler
    known = [key for key in schedulers.__all__ if key not in ("LRScheduler", "ReduceLROnPlateau")]
    if name == "ReduceLROnPlateau":
        raise BadFileError(
            f"{_KEY}.name: ReduceLROnPlateau needs the loss, and a schedule knows the step alone"
        )
    if name not in known:
        raise _unknown_name(config.name, [f"torch/{key}" for key in known])
    return getattr(schedulers, name)


def _refuse_short(name: str, arguments: dict[str, Any], span: int) -> None:
    """Raise where OneCycleLR would raise in the middle of the run."""
    if name != "OneCycleLR":
        return
    total = arguments.get("total_steps") or arguments.get("epochs", 0) * arguments.get("steps_per_epoch", 0)
    if total < span:
        raise BadFileError(f"{_KEY}.args: OneCycleLR ends at step {total} of {span}; leave out total_steps")


def _construct(
    config: ScheduleConfig, kind: Any, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]
) -> Any:
    """Make the scheduler; what it says against its arguments is the file's error."""
    own = {"self", "optimizer", "last_epoch", "t_in_epochs", "initialize"}
    known = sorted(inspect.signature(kind).parameters.keys() - own)
    for name in config.args.keys() - set(known):
        raise BadFileError(f"{_KEY}.args: {_unknown_argument(config.name, name, known)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(optimizer, **arguments)
    except (TypeError, ValueError, AssertionError, ZeroDivisionError, KeyError, AttributeError) as error:
        raise BadFileError(
            f"{_KEY}.args: {config.name} can't be made with {config.args}: {error}; mend them"
        ) from error
