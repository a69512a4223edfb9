"""The built-in learning-rate schedules, one row each: their names, arguments and shapes. No torch.

``validate`` reads the names, ``training.optimization`` builds a schedule from a row. A new schedule is a
function and its row in ``OVER_SPAN`` or ``OVER_STEPS``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import dotted, unknown_argument
from hpc_train.experiment.config.training_sections import ScheduleConfig

#: Step → factor of the peak learning rate.
Schedule = Callable[[int], float]

ARGS = ("optimization", "schedule", "args")


class ScheduleArguments:
    """Reads ``schedule.args``; checks every value and refuses unknown names."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: int) -> None:
        self._config = config
        self._steps_per_epoch = steps_per_epoch
        self._known: set[str] = set()

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number; ``default`` None: the argument is required."""
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
        """Raise for the first name that the schedule did not read."""
        for name in self._config.args.keys() - self._known:
            raise unknown_argument(ARGS, self._config.name, name, sorted(self._known)).as_error()

    def _one_of(self, first: str, second: str, *, needed: bool) -> str:
        names = [name for name in (first, second) if name in self._config.args]
        if len(names) > 1 or (needed and not names):
            count = "both" if names else "neither"
            raise self._error(f"{self._config.name} takes {first} or {second} and has {count}; write one")
        return names[0] if names else first

    def _error(self, message: str) -> BadFileError:
        return BadFileError(f"{dotted(ARGS)}: {message}")


# Functions of x in [0, 1), the completed part of the steps after the warm-up; from 1 to 0.


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


# Functions of the step, counted from the start of the run.


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


#: Schedules over the steps after the warm-up.
OVER_SPAN = {"cosine": _cosine, "linear": _linear, "poly": _poly}
#: Schedules over the steps of the whole run.
OVER_STEPS = {"constant": _constant, "step": _step, "multistep": _multistep, "exponential": _exponential}
