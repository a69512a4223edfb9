"""The built-in learning-rate schedules, one row each: their names, arguments and shapes. No torch.

``validate`` reads the names, ``training.optimization`` builds a schedule from a row. A new schedule is a
function and its row in ``OVER_SPAN`` or ``OVER_STEPS``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import KeyPath, Problem, shown, unknown_argument_problem
from hpc_train.experiment.config.remedies import in_flow
from hpc_train.experiment.config.synonyms import advice_for, argument_for
from hpc_train.experiment.config.training_sections import ScheduleConfig

#: Step → factor of the peak learning rate.
Schedule = Callable[[int], float]

_SECTION: KeyPath = ("optimization", "schedule")
ARGS: KeyPath = (*_SECTION, "args")
#: Examples of arguments without a default.
_EXAMPLES: dict[str, Any] = {"every_epochs": 30, "gamma": 0.1, "milestones_epochs": [30, 60]}


class ScheduleArgumentError(BadFileError):
    """An argument of a schedule is missing or wrong; the ranks' form of ``problem``."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class ScheduleArguments:
    """Reads ``schedule.args``; checks every value and refuses unknown names."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: int) -> None:
        self._config = config
        self._steps_per_epoch = steps_per_epoch
        self._known: set[str] = set()

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number; ``default`` None: the argument is required."""
        self._known.add(name)
        if name not in self._config.args and default is None:
            raise self._missing(name)
        value = self._config.args.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise _wrong(name, f"needs a number above 0, got {shown(value)}")
        return value

    def steps(self, name: str, default_epochs: float | None = None) -> float:
        """Return ``<name>_steps``, or ``<name>_epochs`` in steps; exactly one of them, or the default."""
        given = self._one_of(name, needed=default_epochs is None)
        if given.endswith("_steps"):
            return self.number(given)
        return self._in_steps(self.number(given, default_epochs))

    def _in_steps(self, epochs: float) -> float:
        """Return epochs as steps, rounded: 1.1 · 100 is 110.00000000000001 in floating point."""
        return round(epochs * self._steps_per_epoch, 6)

    def milestones(self) -> list[float]:
        """Return ``milestones_steps`` or ``milestones_epochs`` in steps, in order."""
        name = self._one_of("milestones", needed=True)
        values = self._config.args[name]
        if not isinstance(values, list) or not all(type(v) in (int, float) and v > 0 for v in values):
            raise _wrong(name, f"needs a list of numbers above 0, got {shown(values)}")
        return sorted(values if name.endswith("_steps") else map(self._in_steps, values))

    def refuse_unused(self) -> None:
        """Raise for the first name that the schedule did not read."""
        for name in sorted(self._config.args.keys() - self._known):
            raise self._unknown(name)

    def _one_of(self, name: str, *, needed: bool) -> str:
        """Return ``<name>_steps`` if the file has it, else ``<name>_epochs``."""
        in_epochs, in_steps = f"{name}_epochs", f"{name}_steps"
        self._known |= {in_epochs, in_steps}
        if self._config.args.keys() >= {in_epochs, in_steps}:
            problem = Problem((*ARGS, in_steps), f"can't be combined with {in_epochs}", "take it out")
            raise ScheduleArgumentError(problem)
        if needed and not self._config.args.keys() & {in_epochs, in_steps}:
            raise self._missing(in_epochs)
        return in_steps if in_steps in self._config.args else in_epochs

    def _missing(self, name: str) -> ScheduleArgumentError:
        """Return the error without ``name``, which the file may have under a name of another tool."""
        args = self._config.args
        if called := next((key for key in args if argument_for(_SECTION, key) == name), None):
            return self._unknown(called)
        written = in_flow(args | {name: _EXAMPLES[name]})
        or_steps = f" or {name.replace('_epochs', '_steps')}" if name.endswith("_epochs") else ""
        message = f"{self._config.name} needs {name}{or_steps}, which is missing"
        return ScheduleArgumentError(Problem(ARGS, message, f"write args: {written}", on_key=True))

    def _unknown(self, name: str) -> ScheduleArgumentError:
        meant, owner = argument_for(_SECTION, name), self._config.name
        problem = unknown_argument_problem(ARGS, owner, name, sorted(self._known), meant)
        remedy = (None if meant else advice_for((*_SECTION, name))) or problem.remedy
        return ScheduleArgumentError(Problem((*ARGS, name), problem.message, remedy, on_key=True))


def _wrong(name: str, message: str) -> ScheduleArgumentError:
    remedy = f"write {in_flow(_EXAMPLES.get(name, [3000, 6000] if name.startswith('milestones') else 1))}"
    return ScheduleArgumentError(Problem((*ARGS, name), message, remedy))


def argument_problems(config: ScheduleConfig) -> Iterator[Problem]:
    """Yield the problem with the arguments of a schedule in the tables below."""
    shape = (OVER_SPAN | OVER_STEPS).get(config.name)
    arguments = ScheduleArguments(config, steps_per_epoch=1)
    try:
        if shape is not None:
            shape(arguments)
            arguments.refuse_unused()
    except ScheduleArgumentError as error:
        yield error.problem


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
