"""Rules on ``sweep``: its keys and values, distributions, and conditions of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from pydantic import ValidationError

from hpc_train.experiment.config.explanations import explain
from hpc_train.experiment.config.keys import (
    GRID,
    NOT_IDENTITY,
    SCALING,
    BadKeyError,
    argument_remedy,
    replaced,
    split_key,
)
from hpc_train.experiment.config.problems import KeyPath, Problem, dotted, shown
from hpc_train.experiment.config.schema import Job, Program
from hpc_train.experiment.config.sweep_sections import (
    CHOICE,
    MAX_RUNS,
    RANGES,
    Distribution,
    SweepConfig,
    SweptKey,
    accepted_values,
    by_condition,
    comparable,
    parameters_place,
    swept_keys,
)
from hpc_train.experiment.config.synonyms import value_for
from hpc_train.experiment.validate.base import rule
from hpc_train.registry import is_factory, target_of, unknown_part

MAX_KEYS = 100
#: Sections that can be long, whose values are independent of other sections.
_LONG = {"sweep": True, "slurm": True, "logging": True} | {
    part: {"args": True} for part in ("model", "data", "parallel")
}
#: Without rules on grids alone, so that its problems are reported together with those of other parts.
_WAYS = ("sweep.grid", "sweep.list", "sweep.random", "sweep.search")


def without_runs_to_share(job: Job) -> Problem | None:
    """Return the problem if runs are to share a job although the file has no sweep."""
    if job.slurm is None or job.slurm.runs_per_job == 1 or job.sweep.has_values:
        return None
    message = f"{job.slurm.runs_per_job} runs would share a job, but without a sweep there is one"
    remedy = "take it out, or write a sweep"
    return Problem(("slurm", "runs_per_job"), message, remedy, code="sweep.shared-job")


def swept_paths(experiment: Job) -> Iterator[tuple[SweptKey, KeyPath]]:
    """Yield the sweep's known keys and their paths."""
    for swept in _keys(experiment):
        try:
            yield swept, split_key(swept.key)
        except BadKeyError:
            continue


def _keys(experiment: Job) -> Iterator[SweptKey]:
    """Yield the sweep's keys; none if there are too many: a hostile file must not cost time."""
    return iter(()) if _too_many(experiment.sweep) else swept_keys(experiment.sweep)


def _too_many(sweep: SweepConfig) -> tuple[KeyPath, int] | None:
    """Return the place that has too many keys, and their number; None without one."""
    listed = {key for overrides in sweep.list for key in overrides}
    keys = {GRID: sweep.grid, parameters_place(sweep): sweep.parameters, ("sweep", "list"): listed}
    return next(((place, len(keys[place])) for place in keys if len(keys[place]) > MAX_KEYS), None)


@rule("sweep.many-keys", *_WAYS)
def swept_keys_are_few(experiment: Job) -> Iterator[Problem]:
    """A sweep has a maximum number of keys."""
    if too_many := _too_many(experiment.sweep):
        place, count = too_many
        yield Problem(place, f"has {count:,} keys", f"write at most {MAX_KEYS}", on_key=True)


@rule("sweep.unknown-key", *_WAYS)
def swept_keys_exist(experiment: Job) -> Iterator[Problem]:
    """The keys of a sweep must be keys of the file."""
    for swept in _keys(experiment):
        try:
            split_key(swept.key)
        except BadKeyError as error:
            is_program = isinstance(experiment, Program)
            remedy = argument_remedy(swept.key) if is_program else error.problem.remedy
            yield replace(error.problem, path=swept.place, remedy=remedy, on_key=True)


@rule("sweep.not-identity", *_WAYS)
def swept_keys_change_the_run(experiment: Job) -> Iterator[Problem]:
    """A swept key must be part of the run's id."""
    excluded = [tuple(key.split(".")) for key in NOT_IDENTITY]
    for swept, path in swept_paths(experiment):
        if path in SCALING:
            continue
        if any(path[: len(outside)] == outside for outside in excluded):
            message = "is not part of a run's id, so all values would give the same run"
            yield Problem(swept.place, message, _taking_out(swept), on_key=True)


def _taking_out(swept: SweptKey) -> str:
    return "take it out of the grid" if swept.place[:2] == GRID else "take it out of the sweep"


@rule("sweep.overlap", *_WAYS)
def swept_keys_lie_apart(experiment: Job) -> Iterator[Problem]:
    """A swept key must not be a parent of another one, nor be swept in two ways."""
    whole: dict[KeyPath, SweptKey] = {}
    begun: dict[KeyPath, SweptKey] = {}
    for swept, path in swept_paths(experiment):
        starts = [path[:end] for end in range(1, len(path) + 1)]
        others = [begun.get(path), *(whole.get(start) for start in starts)]
        if other := next((other for other in others if other and not _in_other_runs(swept, other)), None):
            message = f"overlaps with {dotted((other.key,))}"
            if other.key == swept.key:
                message = f"is also in {dotted(other.place[:2])}"
            yield Problem(swept.place, message, "sweep one of the two", on_key=True)
        whole.setdefault(path, swept)
        for start in starts:
            begun.setdefault(start, swept)


def _in_other_runs(swept: SweptKey, other: SweptKey) -> bool:
    return swept.place[:2] == other.place[:2] == ("sweep", "list") and swept.place[2] != other.place[2]


@rule("sweep.repeated", *_WAYS)
def swept_values_differ(experiment: Job) -> Iterator[Problem]:
    """The values of a swept key must differ, and so must the runs of a list."""
    for swept in _keys(experiment):
        if not swept.is_range:
            yield from _repeated(swept.values, "value")
    entries = enumerate(experiment.sweep.list)
    yield from _repeated(tuple((("sweep", "list", index), values) for index, values in entries), "run")


def _repeated(values: tuple[tuple[KeyPath, Any], ...], what: str) -> Iterator[Problem]:
    seen: dict[object, int] = {}
    for index, (place, value) in enumerate(values):
        first = seen.setdefault(comparable(value), index)
        if first != index:
            yield Problem(place, f"is the same as {what} {first + 1} of the list", "take it out")


@rule("sweep.not-finite", *_WAYS)
def swept_numbers_are_finite(experiment: Job) -> Iterator[Problem]:
    """The values of a sweep must not be NaN or infinite."""
    for swept in _keys(experiment):
        for place, value in swept.values:
            if not _is_finite(value):
                yield Problem(place, f"needs finite numbers, got {shown(value)}", _taking_out(swept))


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@rule("sweep.many-runs", *_WAYS)
def runs_are_countable(experiment: Job) -> Iterator[Problem]:
    """A sweep has a maximum number of runs."""
    sweep, runs = experiment.sweep, _count(experiment.sweep)
    if runs > MAX_RUNS:
        # Python can't print integers of more than 4300 digits.
        how_many = f"{runs:,}" if runs < 10**18 else "over 10**18"
        place = ("sweep",) if sweep.list or sweep.random else GRID
        yield Problem(place, f"makes {how_many} runs", f"write at most {MAX_RUNS:,}")


def _count(sweep: SweepConfig) -> int:
    draws = sweep.random.count if sweep.random else 1
    return prod(len(values) for values in sweep.grid.values()) * max(1, len(sweep.list)) * draws


@rule("sweep.value", *_WAYS)
def swept_values_fit_their_keys(experiment: Job) -> Iterator[Problem]:
    """Each value must be valid for its key, and so must both bounds of a range."""
    if _count(experiment.sweep) > MAX_RUNS:
        return
    base = experiment.model_dump(exclude=_LONG)
    valid: set[object] = set()
    for swept, path in swept_paths(experiment):
        if path[0] == "sweep":
            continue
        for place, value in swept.values:
            judged = (path, type(value).__name__, comparable(value))  # thousands of runs have the same
            if judged not in valid:
                misfits = list(_misfit(type(experiment), base, path, value, place))
                yield from misfits
                if not misfits:
                    valid.add(judged)


def _misfit(
    kind: type[Job], base: dict[str, Any], path: KeyPath, value: Any, place: KeyPath
) -> Iterator[Problem]:
    data = replaced(base, path, value)
    try:
        kind.model_validate(data)
    except ValidationError as error:
        for problem in explain(error, data):
            if problem.path[: len(path)] == path:
                yield replace(problem, path=(*place, *problem.path[len(path) :]))


_EXAMPLE = "write one, like {uniform: [0, 1]} or {choice: [a, b]}"
_STEPPED = ("uniform", "int")


def _parameters(experiment: Job) -> Iterator[tuple[KeyPath, Distribution]]:
    for key, distribution in experiment.sweep.parameters.items():
        yield (*parameters_place(experiment.sweep), key), distribution


@rule("sweep.distribution", "sweep.random", "sweep.search")
def parameters_have_one_distribution(experiment: Job) -> Iterator[Problem]:
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


@rule("sweep.empty-range", "sweep.random", "sweep.search")
def ranges_are_not_empty(experiment: Job) -> Iterator[Problem]:
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


@rule("sweep.step", "sweep.random", "sweep.search")
def steps_are_for_ranges(experiment: Job) -> Iterator[Problem]:
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


@rule("sweep.condition", "sweep.grid", "sweep.list", "sweep.random", "sweep.search")
def conditions_can_be_fulfilled(experiment: Job) -> Iterator[Problem]:
    """``when`` names other swept keys, not in a circle, and their values."""
    possible = _Possible(swept_keys(experiment.sweep))
    ordered = set(by_condition(experiment.sweep.parameters))
    for place, distribution in _parameters(experiment):
        where = (*place, "when")
        if place[-1] not in ordered:
            yield Problem(where, "depends on the parameter itself", "take it out", on_key=True)
        else:
            yield from possible.problems(distribution.when or {}, where)


@rule("sweep.exclusion", "sweep.grid", "sweep.list", "sweep.random", "sweep.exclude", "sweep.search")
def exclusions_exclude_something(experiment: Job) -> Iterator[Problem]:
    """``sweep.exclude`` names swept keys and their values."""
    possible = _Possible(swept_keys(experiment.sweep))
    for index, conditions in enumerate(experiment.sweep.exclude):
        place: KeyPath = ("sweep", "exclude", index)
        if not conditions:
            yield Problem(place, "excludes all runs", "write the values of the runs to exclude")
        yield from possible.problems(conditions, place)


class _Possible:
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


@rule("sweep.search-combined", "sweep.grid", "sweep.list", "sweep.random", "sweep.search")
def a_search_is_alone(experiment: Job) -> Iterator[Problem]:
    """``sweep.search`` excludes the other ways to vary keys."""
    sweep = experiment.sweep
    others = [name for name in ("grid", "list", "random") if getattr(sweep, name)]
    if sweep.search is not None and others:
        message = f"excludes sweep.{others[0]}"
        yield Problem(("sweep", "search"), message, "keep one of the two", on_key=True)


@rule("sweep.method", "sweep.search")
def the_method_exists(experiment: Job) -> Iterator[Problem]:
    """``sweep.search.method`` is the name of a built-in method or of a plug-in."""
    search = experiment.sweep.search
    if search is not None and not is_factory(search.method) and target_of("search", search.method) is None:
        path = ("sweep", "search", "method")
        message, remedy = unknown_part("search", search.method)
        meant = value_for(path, search.method)
        yield Problem(path, message, f"write {meant}" if meant else remedy)
