"""One file → the runs of its sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.config.keys import SCALING, split_key
from hpc_train.config.problems import MAX_PROBLEMS, KeyPath
from hpc_train.config.schema import Experiment
from hpc_train.config.sweep_sections import SweepConfig
from hpc_train.errors import BadFileError
from hpc_train.plan.combinations import combinations
from hpc_train.plan.identity import run_id
from hpc_train.validate.loading import Loaded
from hpc_train.validate.model_facts import one_child


@dataclass(frozen=True)
class Variant:
    """One run of a sweep; ``values`` are the swept keys and their values."""

    id: str
    values: dict[str, Any]
    experiment: Experiment


def expand(loaded: Loaded, trials: Sequence[Mapping[str, Any]] | None = None) -> list[Variant]:
    """Return the runs: all combinations, the last key of the grid varying fastest; one run without a sweep.

    ``trials``: the values that a search proposes; None: examples of them, to check the file. Raises
    BadFileError with all problems of all combinations, also if two of them are the same run.
    """
    variants: list[Variant] = []
    problems: dict[str, None] = {}
    with one_child():
        for combination in combinations(loaded.experiment.sweep, trials):
            values = dict(combination.values)
            try:
                whole = loaded.variant(values, combination.places) if values else loaded.experiment
            except BadFileError as error:
                problems |= dict.fromkeys(error.problems)
                continue
            experiment = _single(whole)
            variants.append(Variant(run_id(experiment, _scaled_by(values)), values, experiment))
    problems = problems or dict.fromkeys(_problems_of_all(loaded, variants))
    if problems:
        raise BadFileError(list(problems)[:MAX_PROBLEMS])
    first: dict[str, Variant] = {}
    for variant in variants:  # a draw may repeat another
        first.setdefault(variant.id, variant)
    return list(first.values())


def id_of(loaded: Loaded, values: Mapping[str, Any]) -> str | None:
    """Return the id of the file's run with ``values``; None if they are invalid or excluded."""
    if loaded.experiment.sweep.is_excluded(values):
        return None
    try:
        return run_id(loaded.variant(values), _scaled_by(values))
    except BadFileError:
        return None


def _single(experiment: Experiment) -> Experiment:
    """Return one run's experiment without the sweep, except for the keys that a queue needs."""
    without = SweepConfig(max_parallel=experiment.sweep.max_parallel)
    return experiment if experiment.sweep == without else experiment.model_copy(update={"sweep": without})


def _scaled_by(keys: Iterable[str]) -> list[KeyPath]:
    """Return the swept keys that only change the size of the job."""
    return sorted(path for key in keys if (path := split_key(key)) in SCALING)


def _problems_of_all(loaded: Loaded, variants: list[Variant]) -> Iterator[str]:
    """Yield the problems of valid runs: there are none, or two of a grid or a list are the same."""
    sweep = loaded.experiment.sweep
    if not variants and sweep.exclude and sweep.search is None:
        yield loaded.problem(
            "sweep.exclude", "excludes all runs", "take one of its entries out", "sweep.excludes-all"
        )
    if sweep.random is not None or sweep.search is not None:
        return
    place = "sweep.grid" if not sweep.list else "sweep.list" if not sweep.grid else "sweep"
    first: dict[str, Variant] = {}
    for variant in variants:
        other = first.setdefault(variant.id, variant)
        if other is not variant:
            message = f"{describe(other.values)} and {describe(variant.values)} are the same run {variant.id}"
            remedy = "remove one of the two: a run trains only once"
            yield loaded.problem(place, message, remedy, "sweep.same-run")


def describe(values: Mapping[str, Any]) -> str:
    """Return ``optimization.optimizer.lr=0.1 seed=2``, values as in an experiment file."""
    return " ".join(f"{key}={_text(value)}" for key, value in values.items()) or "the file itself"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
