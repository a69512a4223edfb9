"""The section ``sweep``: which runs one file describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from hpc_train.experiment.config.fields import (
    Bounds,
    FloatRange,
    IntRange,
    MethodName,
    MetricName,
    PositiveFloat,
    PositiveInt,
    PositiveIntRange,
    Section,
)
from hpc_train.experiment.config.problems import KeyPath

#: The largest sweep.
MAX_RUNS = 10_000
#: The keys of the section that say which runs there are.
SWEPT: tuple[KeyPath, ...] = tuple(("sweep", key) for key in ("grid", "list", "random", "exclude", "search"))
#: Distributions, in the order of the documentation. Their values are two bounds, but those of ``choice``.
CHOICE = "choice"
RANGES = ("uniform", "log_uniform", "int", "log_int")

#: Share of a step by which a stepped value may be off: it has few digits.
_ON_A_STEP = 1e-6

# Outside of the classes, whose fields ``list`` and ``int`` would be taken for the types.
_Whole = int
_Values = Annotated[list[Any], Field(min_length=1)]
_Overrides = dict[str, Any]
_OverridesList = Annotated[list[dict[str, Any]], Field(max_length=MAX_RUNS)]
_ExclusionList = Annotated[list[dict[str, Any]], Field(max_length=100)]
#: Each draw computes a hash of each choice.
_Choices = Annotated[list[Any], Field(min_length=1, max_length=1_000)]
_Grid = dict[str, _Values]
_Count = Annotated[int, Field(ge=1, le=MAX_RUNS, examples=[20])]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Distribution(Section):
    """Where the values of one parameter come from: one of ``choice``, ``uniform``, ``log_uniform``, ``int``
    and ``log_int``.
    """

    choice: _Choices | None = None
    """One of these values, each equally likely."""
    uniform: FloatRange | None = None
    """A number between two bounds."""
    log_uniform: Bounds | None = None
    """A number between two bounds, uniform in its logarithm."""
    int: IntRange | None = None
    """A whole number between two bounds, both included."""
    log_int: PositiveIntRange | None = None
    """A whole number between two bounds, uniform in its logarithm."""
    step: PositiveFloat | None = None
    """With ``uniform`` and ``int``: the distance between possible values, from the lower bound on."""
    when: _Overrides | None = None
    """The parameter is only varied in runs with these values: by key, one value or a list of values."""

    @cached_property
    def _condition(self) -> Conditions:
        return _conditions(self.when or {})

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return True if a run with these values fulfills ``when``, so that the parameter is varied."""
        return _hold(self._condition, values)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the distributions that are given; a valid file gives one."""
        return tuple(kind for kind in (CHOICE, *RANGES) if getattr(self, kind) is not None)

    @property
    def kind(self) -> str:
        """The distribution. Undefined where there is not exactly one."""
        (kind,) = self.kinds
        return kind

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of a range; undefined for ``choice``."""
        low, high = getattr(self, self.kind)
        return low, high

    @property
    def last_step(self) -> _Whole:
        """The number of steps between the bounds; undefined without ``step``."""
        low, high = self.bounds
        return math.floor((high - low) / (self.step or 1.0) * (1 + 1e-12))  # 0.3 / 0.1 is below 3

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers between two bounds."""
        return self.int is not None or self.log_int is not None

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values of ``choice``, else the two bounds."""
        return tuple(getattr(self, self.kind))

    def contains(self, value: Any) -> bool:
        """Return True if ``value`` is one of the choices, or a number between the bounds and on a step."""
        if self.choice is not None:
            return comparable(value) in map(comparable, self.choice)
        if not self.is_number(value) or (self.is_whole and not float(value).is_integer()):
            return False
        low, high = self.bounds
        steps = 0.0 if self.step is None else (float(value) - low) / self.step
        return low <= float(value) <= high and abs(steps - round(steps)) < _ON_A_STEP

    def is_number(self, value: Any) -> bool:
        """Return True if ``value`` is a number of a range."""
        return self.choice is None and isinstance(value, float | _Whole) and not isinstance(value, bool)

    def place_of(self, value: Any) -> _Whole:
        """Return the place of ``value`` among the choices."""
        return [comparable(each) for each in self.ends].index(comparable(value))


_Parameters = Annotated[
    dict[str, Distribution], Field(examples=[{"optimization.optimizer.lr": {"log_uniform": [0.001, 0.1]}}])
]


class RandomConfig(Section):
    """Runs with random values."""

    count: _Count
    """Number of draws. Draws that are excluded, or repeat an earlier one, start no run."""
    seed: _Seed = 0
    """Seed of the draws. A draw depends on it, on its number and on the key only."""
    parameters: _Parameters
    """Distributions by key path."""


class SearchConfig(Section):
    """Runs whose values depend on the results of earlier ones."""

    method: Annotated[MethodName, Field(examples=["tpe"])] = "tpe"
    """Who proposes values: ``tpe`` (needs ``pip install 'hpc-train[optuna]'``) or a plug-in's name."""
    trials: _Count
    """Number of runs in total."""
    max_concurrent: PositiveInt = 4
    """Number of runs that are queued or running at the same time. A ``submit`` starts as many as are missing.
    """
    metric: Annotated[MetricName, Field(examples=["val/accuracy"])]
    """Metric to optimize: ``accuracy`` of the ``val`` rows, or ``train/loss``. Of each run the best value
    counts."""
    mode: Annotated[Literal["min", "max"], Field(examples=["max"])]
    """``max``: a higher value is better; ``min``: a lower one."""
    seed: _Seed = 0
    """Seed of the proposals."""
    parameters: _Parameters
    """Distributions by key path."""


class SweepConfig(Section):
    """A sweep: many runs from one file."""

    grid: _Grid = {}
    """Lists of values by key path. The runs are all combinations; the last key varies fastest."""
    list: _OverridesList = []
    """Values by key path, one mapping per run. With ``grid`` or ``random``: all combinations with theirs."""
    random: RandomConfig | None = None
    """Random values. With ``grid`` or ``list``: all combinations with theirs. Default: off."""
    exclude: _ExclusionList = []
    """Combinations that are not run: each mapping excludes the runs that have all of its values."""
    search: SearchConfig | None = None
    """Values that are proposed from the results of earlier runs. Excludes ``grid``, ``list`` and ``random``.
    Default: off."""
    max_parallel: PositiveInt | None = None
    """Number of runs that may be active at the same time. Default: no limit."""

    @cached_property
    def exclusions(self) -> tuple[Conditions, ...]:
        """The conditions of runs that ``exclude`` names."""
        return tuple(map(_conditions, self.exclude))

    def is_excluded(self, values: Mapping[str, Any]) -> bool:
        """Return True if ``exclude`` names a run with these values."""
        return any(_hold(conditions, values) for conditions in self.exclusions)

    @property
    def has_values(self) -> bool:
        """Whether it varies a key."""
        return bool(self.grid or self.list or self.random or self.search)

    @property
    def parameters(self) -> Mapping[str, Distribution]:
        """The distributions of ``random`` or ``search``."""
        found = self.random or self.search
        return found.parameters if found else {}


@dataclass(frozen=True)
class SweptKey:
    """A key that a sweep varies, once per place of the file that names it."""

    key: str
    #: Of the key in the file.
    place: KeyPath
    #: Its values, each with its place; of a range the two bounds.
    values: tuple[tuple[KeyPath, Any], ...]
    #: Whether there are values between the bounds.
    is_range: bool = False


def swept_keys(sweep: SweepConfig) -> Iterator[SweptKey]:
    """Yield the keys of grid, list and distributions, in this order. Distributions must be valid."""
    for key, values in sweep.grid.items():
        place: KeyPath = ("sweep", "grid", key)
        yield SweptKey(key, place, tuple(((*place, index), value) for index, value in enumerate(values)))
    for index, overrides in enumerate(sweep.list):
        for key, value in overrides.items():
            place = ("sweep", "list", index, key)
            yield SweptKey(key, place, ((place, value),))
    for key, distribution in sweep.parameters.items():
        yield _swept_parameter(key, distribution, (*parameters_place(sweep), key))


def _swept_parameter(key: str, distribution: Distribution, place: KeyPath) -> SweptKey:
    if len(distribution.kinds) != 1:
        return SweptKey(key, place, ())
    kind = distribution.kind
    values = (((*place, kind, index), value) for index, value in enumerate(distribution.ends))
    return SweptKey(key, place, tuple(values), is_range=kind != CHOICE)


def parameters_place(sweep: SweepConfig) -> KeyPath:
    """Return where the file has the distributions."""
    return ("sweep", "random" if sweep.random else "search", "parameters")


def comparable(value: Any) -> object:
    """Return an object that is equal for equal values of the file: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return ("mapping", *sorted((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", *map(comparable, value))
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


#: Key → the values of which a run must have one, as ``comparable`` returns them.
Conditions = Mapping[str, frozenset[object]]


def _conditions(section: Mapping[str, Any]) -> Conditions:
    return {key: frozenset(map(comparable, accepted_values(wanted))) for key, wanted in section.items()}


def _hold(conditions: Conditions, values: Mapping[str, Any]) -> bool:
    return all(key in values and comparable(values[key]) in wanted for key, wanted in conditions.items())


def accepted_values(wanted: Any) -> tuple[Any, ...]:
    """Return the values of a condition: a list is one of several."""
    return tuple(wanted) if isinstance(wanted, list) else (wanted,)


def varied(parameters: Mapping[str, Distribution], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` without the parameters whose condition (``when``) they do not fulfil."""
    kept = {key: value for key, value in values.items() if key not in parameters}
    for key in by_condition(parameters):
        if key in values and parameters[key].applies(kept):
            kept[key] = values[key]
    return {key: values[key] for key in values if key in kept}


def by_condition(parameters: Mapping[str, Distribution]) -> Iterator[str]:
    """Yield the keys, each after those that its condition names; not those of conditions in a circle."""
    left = dict(parameters)
    while ready := [key for key, each in left.items() if not left.keys() & (each.when or {}).keys()]:
        yield from ready
        left = {key: each for key, each in left.items() if key not in ready}
