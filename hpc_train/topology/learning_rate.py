"""The built-in learning-rate schedules, one row each: their names, arguments and shapes. No torch.

``validate`` reads the names, ``training.schedules`` makes a run's schedule of a row. A new one is a function
and its row in ``OVER_SPAN`` or ``OVER_STEPS``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from hpc_train.config.problems import dotted, unknown_argument
from hpc_train.config.training_sections import ScheduleConfig
from hpc_train.errors import BadFileError

#: Step → factor of the peak learning rate.
Schedule = Callable[[int], float]

ARGS = ("optimization", "schedule", "args")


class ScheduleArguments:
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
            raise unknown_argument(ARGS, self._config.name, name, sorted(self._known)).as_error()

    def _one_of(self, first: str, second: str, *, needed: bool) -> str:
        given = [name for name in (first, second) if name in self._config.args]
        if len(given) > 1 or (needed and not given):
            said = "both" if given else "neither"
            raise self._error(f"{self._config.name} takes {first} or {second} and has {said}; write one")
        return given[0] if given else first

    def _error(self, what: str) -> BadFileError:
        return BadFileError(f"{dotted(ARGS)}: {what}")


# Of the part x in [0, 1) of the steps after the warm-up that is done, from 1 to 0.


def _cosine(arguments: ScheduleArguments) -> Callable[[float], float]:
    # arXiv:1608.03983, eq. 5; torch's CosineAnnealingLR, timm's CosineLRScheduler with warmup_prefix.
    return lambda x: (1 + math.cos(math.pi * x)) / 2


def _linear(arguments: ScheduleArguments) -> Callable[[float], float]:
    # torch's LinearLR from 1 to min_factor.
    return lambda x: 1 - x


def _poly(arguments: ScheduleArguments) -> Callable[[float], float]:
    # torch's PolynomialLR, timm's PolyLRScheduler with warmup_prefix.
    power = arguments.number("power", 1.0)
    return lambda x: float((1 - x) ** power)


# Of the step, counted from the run's beginning.


def _constant(arguments: ScheduleArguments) -> Schedule:
    return lambda step: 1.0


def _step(arguments: ScheduleArguments) -> Schedule:
    # torch's StepLR, timm's StepLRScheduler without warmup_prefix.
    every, gamma = arguments.steps("every"), arguments.number("gamma", 0.1)
    return lambda step: float(gamma ** (step // every))


def _multistep(arguments: ScheduleArguments) -> Schedule:
    # torch's MultiStepLR, timm's MultiStepLRScheduler without warmup_prefix.
    milestones, gamma = arguments.milestones(), arguments.number("gamma", 0.1)
    return lambda step: float(gamma ** bisect.bisect_right(milestones, step))


def _exponential(arguments: ScheduleArguments) -> Schedule:
    # torch's ExponentialLR at whole epochs, smooth between them.
    every, gamma = arguments.steps("every", default_epochs=1), arguments.number("gamma")
    return lambda step: float(gamma ** (step / every))


#: Of the steps after the warm-up.
OVER_SPAN = {"cosine": _cosine, "linear": _linear, "poly": _poly}
#: Of the steps of the whole run.
OVER_STEPS = {"constant": _constant, "step": _step, "multistep": _multistep, "exponential": _exponential}
