"""Rules on the distributions of ``sweep.random`` and ``sweep.search``, and on conditions of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpc_train.config.problems import KeyPath, Problem, dotted, shown
from hpc_train.config.schema import Experiment
from hpc_train.config.sweep_sections import (
    CHOICE,
    RANGES,
    Distribution,
    SweptKey,
    accepted_values,
    by_condition,
    comparable,
    parameters_place,
    swept_keys,
)
from hpc_train.registry import is_factory, target_of, unknown_part
from hpc_train.validate.base import Rule, rule

_EXAMPLE = "write one, like {uniform: [0, 1]} or {choice: [a, b]}"
_STEPPED = ("uniform", "int")


def _parameters(experiment: Experiment) -> Iterator[tuple[KeyPath, Distribution]]:
    """Yield the distributions with their places."""
    for key, distribution in experiment.sweep.parameters.items():
        yield (*parameters_place(experiment.sweep), key), distribution


@rule("sweep.random", "sweep.search")
def parameters_have_one_distribution(experiment: Experiment) -> Iterator[Problem]:
    """There is a parameter, and each has exactly one distribution."""
    sweep = experiment.sweep
    if (sweep.random or sweep.search) and not sweep.parameters:
        yield Problem(parameters_place(sweep), "names no parameter", "write KEY: {uniform: [0, 1]}")
    for place, distribution in _parameters(experiment):
        kinds = distribution.kinds
        if not kinds:
            yield Problem(place, f"needs one of {CHOICE}, {', '.join(RANGES)}", _EXAMPLE, on_key=True)
        elif len(kinds) > 1:
            yield Problem(place, f"has {' and '.join(kinds)}", "keep one of them", on_key=True)


@rule("sweep.random", "sweep.search")
def ranges_are_not_empty(experiment: Experiment) -> Iterator[Problem]:
    """A range has a lower and a higher bound, and room for a step."""
    for place, distribution in _parameters(experiment):
        if len(distribution.kinds) != 1 or distribution.kind == CHOICE:
            continue
        low, high = distribution.bounds
        bounds = (*place, distribution.kind)
        if low == high:
            yield Problem(bounds, f"has the one value {shown(low)}", "write a higher second bound")
        elif low > high:
            yield Problem(bounds, f"is empty: {shown(low)} is above {shown(high)}", "write the lower first")
        elif distribution.step is not None and distribution.step > high - low:
            message = f"{shown(distribution.step)} exceeds the range of {shown(high - low)}"
            yield Problem((*place, "step"), message, "write a smaller step")


@rule("sweep.random", "sweep.search")
def steps_are_for_ranges(experiment: Experiment) -> Iterator[Problem]:
    """``step`` needs a range that is not logarithmic, and is an integer if the values are."""
    for place, distribution in _parameters(experiment):
        step = distribution.step
        if step is None or len(distribution.kinds) != 1:
            continue
        if distribution.kind not in _STEPPED:
            message = f"has no effect with {distribution.kind}"
            yield Problem((*place, "step"), message, f"take it out, or write {' or '.join(_STEPPED)}")
        elif distribution.is_whole and not float(step).is_integer():
            yield Problem((*place, "step"), f"needs a whole number, got {shown(step)}", "write one like 2")


@rule("sweep.grid", "sweep.list", "sweep.random", "sweep.search")
def conditions_can_be_fulfilled(experiment: Experiment) -> Iterator[Problem]:
    """``when`` names other swept keys, not in a circle, and their values."""
    possible = _Possible(swept_keys(experiment.sweep))
    ordered = set(by_condition(experiment.sweep.parameters))
    for place, distribution in _parameters(experiment):
        where = (*place, "when")
        if place[-1] not in ordered:
            yield Problem(where, "depends on the parameter itself", "take it out", on_key=True)
        else:
            yield from possible.problems(distribution.when or {}, where)


@rule("sweep.grid", "sweep.list", "sweep.random", "sweep.exclude", "sweep.search")
def exclusions_exclude_something(experiment: Experiment) -> Iterator[Problem]:
    """``sweep.exclude`` names swept keys and their values."""
    possible = _Possible(swept_keys(experiment.sweep))
    for index, conditions in enumerate(experiment.sweep.exclude):
        place: KeyPath = ("sweep", "exclude", index)
        if not conditions:
            yield Problem(place, "excludes all runs", "write the values of the runs to exclude")
        yield from possible.problems(conditions, place)


class _Possible:
    """The values that a run can have, by swept key."""

    def __init__(self, keys: Iterable[SweptKey]) -> None:
        self._values: dict[str, set[object]] = {}
        self._ranges: set[str] = set()
        for swept in keys:
            self._values.setdefault(swept.key, set()).update(comparable(value) for _, value in swept.values)
            if swept.is_range:
                self._ranges.add(swept.key)

    def problems(self, conditions: Mapping[str, Any], place: KeyPath) -> Iterator[Problem]:
        """Yield the conditions that no run can fulfil."""
        for key, wanted in conditions.items():
            if key not in self._values:
                swept_keys = ", ".join(map(str, list(self._values)[:10])) or "none"
                yield Problem((*place, key), "is not swept", f"write one of {swept_keys}", on_key=True)
            elif key in self._ranges:
                message = f"{dotted((key,))} is drawn from a range, so no value can be expected"
                yield Problem((*place, key), message, "name keys with lists of values only", on_key=True)
            else:
                yield from self._unknown(key, wanted, (*place, key))

    def _unknown(self, key: str, wanted: Any, place: KeyPath) -> Iterator[Problem]:
        for index, value in enumerate(accepted_values(wanted)):
            if comparable(value) not in self._values[key]:
                where = (*place, index) if isinstance(wanted, list) else place
                yield Problem(where, f"no run has {shown(value)}", "write a value of the sweep")


@rule("sweep.grid", "sweep.list", "sweep.random", "sweep.search")
def a_search_is_alone(experiment: Experiment) -> Iterator[Problem]:
    """``sweep.search`` excludes the other ways to vary keys."""
    sweep = experiment.sweep
    others = [name for name in ("grid", "list", "random") if getattr(sweep, name)]
    if sweep.search is not None and others:
        message = f"excludes sweep.{others[0]}"
        yield Problem(("sweep", "search"), message, "keep one of the two", on_key=True)


@rule("sweep.search")
def the_method_exists(experiment: Experiment) -> Iterator[Problem]:
    """``sweep.search.method`` is the name of a built-in method or of a plug-in."""
    search = experiment.sweep.search
    if search is not None and not is_factory(search.method) and target_of("search", search.method) is None:
        yield Problem(("sweep", "search", "method"), *unknown_part("search", search.method))


RULES: tuple[Rule, ...] = (
    parameters_have_one_distribution,
    ranges_are_not_empty,
    steps_are_for_ranges,
    conditions_can_be_fulfilled,
    exclusions_exclude_something,
    a_search_is_alone,
    the_method_exists,
)
