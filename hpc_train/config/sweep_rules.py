"""Rules on ``sweep.grid``: its keys, each of its values, and how many runs they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from pydantic import ValidationError

from hpc_train.config.explanations import explain
from hpc_train.config.keys import GRID, NOT_IDENTITY, BadKeyError, replaced, split_key
from hpc_train.config.problems import KeyPath, Problem, Rule, dotted, related, rule
from hpc_train.config.schema import Experiment

MAX_RUNS = 10_000


def swept_paths(experiment: Experiment) -> dict[str, KeyPath]:
    """Return the grid's keys that the schema knows and their paths."""
    found: dict[str, KeyPath] = {}
    for key in experiment.sweep.grid:
        try:
            found[key] = split_key(key)
        except BadKeyError:
            continue
    return found


@rule("sweep.grid")
def swept_keys_exist(experiment: Experiment) -> Iterator[Problem]:
    for key in experiment.sweep.grid:
        try:
            split_key(key)
        except BadKeyError as error:
            yield replace(error.problem, path=(*GRID, key), on_key=True)


@rule("sweep.grid")
def swept_keys_change_the_run(experiment: Experiment) -> Iterator[Problem]:
    excluded = [tuple(key.split(".")) for key in NOT_IDENTITY]
    for key, path in swept_paths(experiment).items():
        if any(path[: len(outside)] == outside for outside in excluded):
            message = "does not change what a run is, so its runs would be one"
            yield Problem((*GRID, key), message, "take it out of the grid", on_key=True)


@rule("sweep.grid")
def swept_keys_lie_apart(experiment: Experiment) -> Iterator[Problem]:
    paths = list(swept_paths(experiment).items())
    for place, (key, path) in enumerate(paths):
        for other_key, other in paths[:place]:
            if related(path, other):
                message = f"lies within the same part of the file as {dotted((other_key,))}"
                yield Problem((*GRID, key), message, "sweep one of the two", on_key=True)


@rule("sweep.grid")
def swept_values_differ(experiment: Experiment) -> Iterator[Problem]:
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
def runs_are_countable(experiment: Experiment) -> Iterator[Problem]:
    runs = prod(len(values) for values in experiment.sweep.grid.values())
    if runs > MAX_RUNS:
        yield Problem(GRID, f"makes {runs:,} runs", f"write at most {MAX_RUNS:,}")


@rule("sweep.grid")
def swept_values_fit_their_keys(experiment: Experiment) -> Iterator[Problem]:
    paths = swept_paths(experiment)
    if prod(len(values) for values in experiment.sweep.grid.values()) > MAX_RUNS:
        return
    base = experiment.model_dump(exclude={"sweep"})
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
    swept_keys_exist,
    swept_keys_change_the_run,
    swept_keys_lie_apart,
    swept_values_differ,
    runs_are_countable,
    swept_values_fit_their_keys,
)
