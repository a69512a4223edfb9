"""Rules on the keys and values of ``sweep``; those on distributions are in ``distribution_rules``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from pydantic import ValidationError

from hpc_train.config.explanations import explain
from hpc_train.config.keys import GRID, NOT_IDENTITY, SCALING, BadKeyError, replaced, split_key
from hpc_train.config.problems import KeyPath, Problem, dotted, shown
from hpc_train.config.schema import Experiment
from hpc_train.config.sweep_sections import (
    MAX_RUNS,
    SweepConfig,
    SweptKey,
    comparable,
    parameters_place,
    swept_keys,
)
from hpc_train.validate import distribution_rules
from hpc_train.validate.base import Rule, rule

MAX_KEYS = 100
#: Sections that can be long, whose values are independent of other sections.
_LONG = {"sweep": True, "slurm": True, "logging": True} | {
    part: {"args": True} for part in ("model", "data", "parallel")
}
#: Without rules on grids alone, so that its problems are reported together with those of other parts.
_sweep_rule = rule("sweep.grid", "sweep.list", "sweep.random", "sweep.search")


def swept_paths(experiment: Experiment) -> Iterator[tuple[SweptKey, KeyPath]]:
    """Yield the sweep's known keys and their paths."""
    for swept in _keys(experiment):
        try:
            yield swept, split_key(swept.key)
        except BadKeyError:
            continue


def _keys(experiment: Experiment) -> Iterator[SweptKey]:
    """Yield the sweep's keys; none if there are too many: a hostile file must not cost time."""
    return iter(()) if _too_many(experiment.sweep) else swept_keys(experiment.sweep)


def _too_many(sweep: SweepConfig) -> KeyPath | None:
    """Return the place that has too many keys, or None."""
    if len(sweep.grid) > MAX_KEYS:
        return GRID
    if len(sweep.parameters) > MAX_KEYS:
        return parameters_place(sweep)
    keys = {key for overrides in sweep.list for key in overrides}
    return ("sweep", "list") if len(keys) > MAX_KEYS else None


@_sweep_rule
def swept_keys_are_few(experiment: Experiment) -> Iterator[Problem]:
    """A sweep has a maximum number of keys."""
    if place := _too_many(experiment.sweep):
        sweep = experiment.sweep
        keys = {key for overrides in sweep.list for key in overrides}
        count = len(sweep.grid if place == GRID else keys if place[-1] == "list" else sweep.parameters)
        yield Problem(place, f"has {count:,} keys", f"write at most {MAX_KEYS}", on_key=True)


@_sweep_rule
def swept_keys_exist(experiment: Experiment) -> Iterator[Problem]:
    """The keys of a sweep must be keys of the file."""
    for swept in _keys(experiment):
        try:
            split_key(swept.key)
        except BadKeyError as error:
            yield replace(error.problem, path=swept.place, on_key=True)


@_sweep_rule
def swept_keys_change_the_run(experiment: Experiment) -> Iterator[Problem]:
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


@_sweep_rule
def swept_keys_lie_apart(experiment: Experiment) -> Iterator[Problem]:
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
    """Return True if the two are in different mappings of the list."""
    return swept.place[:2] == other.place[:2] == ("sweep", "list") and swept.place[2] != other.place[2]


@_sweep_rule
def swept_values_differ(experiment: Experiment) -> Iterator[Problem]:
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


@_sweep_rule
def swept_numbers_are_finite(experiment: Experiment) -> Iterator[Problem]:
    """The values of a sweep must not be NaN or infinite."""
    for swept in _keys(experiment):
        for place, value in swept.values:
            if not _is_finite(value):
                yield Problem(place, f"needs finite numbers, got {shown(value)}", _taking_out(swept))


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@_sweep_rule
def runs_are_countable(experiment: Experiment) -> Iterator[Problem]:
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


@_sweep_rule
def swept_values_fit_their_keys(experiment: Experiment) -> Iterator[Problem]:
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
                misfits = list(_misfit(base, path, value, place))
                yield from misfits
                if not misfits:
                    valid.add(judged)


def _misfit(base: dict[str, Any], path: KeyPath, value: Any, place: KeyPath) -> Iterator[Problem]:
    data = replaced(base, path, value)
    try:
        Experiment.model_validate(data)
    except ValidationError as error:
        for problem in explain(error, data):
            if problem.path[: len(path)] == path:
                yield replace(problem, path=(*place, *problem.path[len(path) :]))


RULES: tuple[Rule, ...] = (
    swept_keys_are_few,
    swept_keys_exist,
    swept_keys_change_the_run,
    swept_keys_lie_apart,
    swept_values_differ,
    swept_numbers_are_finite,
    runs_are_countable,
    swept_values_fit_their_keys,
    *distribution_rules.RULES,
)
