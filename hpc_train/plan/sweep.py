"""One file → the runs of its sweep."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpc_train.config.keys import SCALING, split_key
from hpc_train.config.problems import KeyPath
from hpc_train.config.schema import Experiment, SweepConfig
from hpc_train.errors import BadFileError
from hpc_train.plan.identity import run_id
from hpc_train.validate.loading import Loaded
from hpc_train.validate.model_facts import one_child


@dataclass(frozen=True)
class Variant:
    """One run of a sweep; ``values`` are the swept keys and their values."""

    id: str
    values: dict[str, Any]
    experiment: Experiment


def expand(loaded: Loaded) -> list[Variant]:
    """Return the runs: all combinations of the grid, the last key varying fastest; one run without a grid.

    Raises BadFileError with all problems of all combinations, and where two of them are the same run.
    """
    variants, problems = [], []
    scaled_by = _scaled_by(loaded.experiment.sweep.grid)
    with one_child():
        for values in _combinations(loaded.experiment.sweep.grid):
            try:
                experiment = _single(loaded.variant(values)) if values else loaded.experiment
            except BadFileError as error:
                problems += error.problems
                continue
            variants.append(Variant(run_id(experiment, scaled_by), values, experiment))
    problems = list(dict.fromkeys(problems)) or _twice(loaded, variants)
    if problems:
        raise BadFileError(problems)
    return variants


def _single(experiment: Experiment) -> Experiment:
    """Return one run's experiment without the sweep, except for what a queue needs."""
    return experiment.model_copy(update={"sweep": SweepConfig(max_parallel=experiment.sweep.max_parallel)})


def _scaled_by(grid: Iterable[str]) -> list[KeyPath]:
    """Return the grid's keys that only change the size of the job."""
    return sorted(path for key in grid if (path := split_key(key)) in SCALING)


def _combinations(grid: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for choice in itertools.product(*grid.values()):
        yield dict(zip(grid, choice, strict=True))


def _twice(loaded: Loaded, variants: list[Variant]) -> list[str]:
    first: dict[str, Variant] = {}
    problems = []
    for variant in variants:
        other = first.setdefault(variant.id, variant)
        if other is not variant:
            message = f"{describe(other.values)} and {describe(variant.values)} are the same run {variant.id}"
            problems.append(
                loaded.problem("sweep.grid", message, "remove one of the two: a run trains only once")
            )
    return problems


def describe(values: dict[str, Any]) -> str:
    """Return ``optimization.optimizer.lr=0.1 seed=2``."""
    return " ".join(f"{key}={value}" for key, value in values.items())
