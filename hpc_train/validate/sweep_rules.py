"""Rules on ``sweep.grid``: its keys, each of its values, and the number of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from pydantic import ValidationError

from hpc_train.config.explanations import explain
from hpc_train.config.keys import GRID, NOT_IDENTITY, SCALING, BadKeyError, replaced, split_key
from hpc_train.config.problems import KeyPath, Problem, Rule, dotted, rule, shown
from hpc_train.config.schema import Experiment

MAX_RUNS = 10_000
MAX_KEYS = 100
#: Sections that can be long, whose values are independent of other sections.
_LONG = {"sweep": True, "slurm": True, "logging": True} | {
    part: {"args": True} for part in ("model", "data", "parallel")
}


def swept_paths(experiment: Experiment) -> dict[str, KeyPath]:
    """Return the grid's known keys and their paths."""
    found: dict[str, KeyPath] = {}
    for key in _keys(experiment):
        try:
            found[key] = split_key(key)
        except BadKeyError:
            continue
    return found


def _keys(experiment: Experiment) -> Iterator[str]:
    """Yield the grid's keys, at most the maximum number: a hostile file must not cost time."""
    return islice(experiment.sweep.grid, MAX_KEYS)


@rule("sweep.grid")
def swept_keys_are_few(experiment: Experiment) -> Iterator[Problem]:
    """The grid has a maximum number of keys."""
    if len(experiment.sweep.grid) > MAX_KEYS:
        message = f"has {len(experiment.sweep.grid):,} keys"
        yield Problem(GRID, message, f"write at most {MAX_KEYS}", on_key=True)


@rule("sweep.grid")
def swept_keys_exist(experiment: Experiment) -> Iterator[Problem]:
    """The keys of the grid must be keys of the file."""
    for key in _keys(experiment):
        try:
            split_key(key)
        except BadKeyError as error:
            yield replace(error.problem, path=(*GRID, key), on_key=True)


@rule("sweep.grid")
def swept_keys_change_the_run(experiment: Experiment) -> Iterator[Problem]:
    """A swept key must be part of the run's id."""
    excluded = [tuple(key.split(".")) for key in NOT_IDENTITY]
    for key, path in swept_paths(experiment).items():
        if path in SCALING:
            continue
        if any(path[: len(outside)] == outside for outside in excluded):
            message = "is not part of a run's id, so all values would give the same run"
            yield Problem((*GRID, key), message, "take it out of the grid", on_key=True)


@rule("sweep.grid")
def swept_keys_lie_apart(experiment: Experiment) -> Iterator[Problem]:
    """A swept key must not be a parent of another one."""
    whole: dict[KeyPath, str] = {}
    begun: dict[KeyPath, str] = {}
    for key, path in swept_paths(experiment).items():
        starts = [path[:end] for end in range(1, len(path) + 1)]
        other = begun.get(path) or next((whole[start] for start in starts if start in whole), None)
        if other is not None:
            message = f"overlaps with {dotted((other,))}"
            yield Problem((*GRID, key), message, "sweep one of the two", on_key=True)
        whole.setdefault(path, key)
        for start in starts:
            begun.setdefault(start, key)


@rule("sweep.grid")
def swept_values_differ(experiment: Experiment) -> Iterator[Problem]:
    """The values of a swept key must differ."""
    for key, values in experiment.sweep.grid.items():
        seen: dict[object, int] = {}
        for index, value in enumerate(values):
            first = seen.setdefault(_comparable(value), index)
            if first != index:
                message = f"is the same as value {first + 1} of the list"
                yield Problem((*GRID, key, index), message, "take it out")


def _comparable(value: Any) -> object:
    if isinstance(value, dict):
        return tuple(sorted((key, _comparable(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", *map(_comparable, value))
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


@rule("sweep.grid")
def swept_numbers_are_finite(experiment: Experiment) -> Iterator[Problem]:
    """The values of the grid must not be NaN or infinite."""
    for key, values in experiment.sweep.grid.items():
        for index, value in enumerate(values):
            if not _is_finite(value):
                message = f"needs finite numbers, got {shown(value)}"
                yield Problem((*GRID, key, index), message, "take it out of the grid")


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@rule("sweep.grid")
def runs_are_countable(experiment: Experiment) -> Iterator[Problem]:
    """The grid has a maximum number of runs."""
    runs = prod(len(values) for values in experiment.sweep.grid.values())
    if runs > MAX_RUNS:
        # Python can't print integers of more than 4300 digits.
        how_many = f"{runs:,}" if runs < 10**18 else "over 10**18"
        yield Problem(GRID, f"makes {how_many} runs", f"write at most {MAX_RUNS:,}")


@rule("sweep.grid")
def swept_values_fit_their_keys(experiment: Experiment) -> Iterator[Problem]:
    """Each value must be valid for its key."""
    paths = swept_paths(experiment)
    if prod(len(values) for values in experiment.sweep.grid.values()) > MAX_RUNS:
        return
    base = experiment.model_dump(exclude=_LONG)
    for key, path in paths.items():
        if path[0] == "sweep":
            continue
        for index, value in enumerate(experiment.sweep.grid[key]):
            yield from _misfit(base, path, value, (*GRID, key, index))


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
)
