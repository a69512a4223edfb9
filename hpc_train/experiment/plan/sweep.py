"""One file → the runs of its sweep and their ids: all combinations of grid, list and draws, less exclusions.

A draw is a hash of (seed, number, key), so that more draws, or another parameter, do not change it. A new
value of ``choice`` changes only the draws that get it. A run's id is a hash of the settings that determine
the trained weights (a contract).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config import sweep_sections
from hpc_train.experiment.config.keys import NOT_IDENTITY, SCALING, split_key, value_at
from hpc_train.experiment.config.problems import MAX_PROBLEMS, KeyPath, dotted
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.config.sweep_sections import Distribution, SweepConfig
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.experiment.validate.sweep_rules import without_runs_to_share

#: Significant digits of a drawn float: readable, and independent of the last bits of the math library.
_DIGITS = 6
#: Digits for draws with a step, whose multiples must stay multiples.
_STEP_DIGITS = 12
#: Bits that a float represents exactly.
_BITS = 53


@dataclass(frozen=True)
class Variant:
    """One run of a sweep; ``values`` are the swept keys and their values."""

    id: str
    values: dict[str, Any]
    experiment: Job


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
            without = SweepConfig(max_parallel=whole.sweep.max_parallel)
            experiment = whole if whole.sweep == without else whole.model_copy(update={"sweep": without})
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


def _scaled_by(keys: Iterable[str]) -> list[KeyPath]:
    return sorted(path for key in keys if (path := split_key(key)) in SCALING)


def _problems_of_all(loaded: Loaded, variants: list[Variant]) -> Iterator[str]:
    """Yield the problems of valid runs: there are none, or two of a grid or a list are the same."""
    sweep = loaded.experiment.sweep
    if not variants and sweep.exclude and sweep.search is None:
        yield loaded.problem(
            "sweep.exclude", "excludes all runs", "take one of its entries out", "sweep.excludes-all"
        )
    if (problem := without_runs_to_share(loaded.experiment)) is not None:
        yield loaded.source.render(problem)
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
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in values.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items()) or "the file itself"


@dataclass(frozen=True)
class Combination:
    """The swept values of one run, and their positions in the file."""

    values: Mapping[str, Any]
    places: Mapping[str, KeyPath]

    def __or__(self, other: Combination) -> Combination:
        return Combination({**self.values, **other.values}, {**self.places, **other.places})


def combinations(
    sweep: SweepConfig, trials: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[Combination]:
    """Yield the runs: entries of the list, for each the draws, for each the grid. Draws may repeat others.

    ``trials``: the values of a search; None: examples of its parameters.
    """
    listed = [
        Combination(overrides, {key: ("sweep", "list", index, key) for key in overrides})
        for index, overrides in enumerate(sweep.list or [{}])
    ]
    for entry, drawn, gridded in itertools.product(listed, list(_drawn(sweep, trials)), list(_grid(sweep))):
        whole = entry | drawn | gridded
        values = sweep_sections.varied(sweep.parameters, whole.values)
        if not sweep.is_excluded(values):
            yield Combination(values, {key: whole.places[key] for key in values})


def _grid(sweep: SweepConfig) -> Iterator[Combination]:
    for choice in itertools.product(*(enumerate(values) for values in sweep.grid.values())):
        chosen = list(zip(sweep.grid, choice, strict=True))
        yield Combination(
            {key: value for key, (_, value) in chosen},
            {key: ("sweep", "grid", key, index) for key, (index, _) in chosen},
        )


def _drawn(sweep: SweepConfig, trials: Sequence[Mapping[str, Any]] | None) -> Iterator[Combination]:
    if sweep.search is not None:
        proposed = examples(sweep.search.parameters) if trials is None else trials
        drawn: Iterator[Mapping[str, Any]] = iter(proposed)
    else:
        drawn = draws(sweep.random) if sweep.random else iter([{}])
    place = sweep_sections.parameters_place(sweep)
    for values in drawn:
        yield Combination(values, {key: (*place, key) for key in values})


def draws(random: sweep_sections.RandomConfig) -> Iterator[dict[str, Any]]:
    """Yield the values of each draw by key; conditions are not applied."""
    for number in range(random.count):
        yield {
            key: draw(distribution, (random.seed, number, key))
            for key, distribution in random.parameters.items()
        }


def draw(distribution: Distribution, counter: tuple[Any, ...]) -> Any:
    """Return the value that belongs to ``counter``, a tuple of JSON values."""
    if distribution.choice is not None:
        return max(distribution.choice, key=lambda value: _hash(*counter, value))
    share = _hash(*counter) / 2**_BITS
    low, high = distribution.bounds
    if distribution.step is not None:
        steps = math.floor(share * (distribution.last_step + 1))
        return rounded(low + steps * distribution.step, distribution)
    if distribution.is_whole:
        high += 1
    if distribution.kind.startswith("log_"):
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    return rounded(math.floor(value) if distribution.is_whole else value, distribution)


def rounded(value: Any, distribution: Distribution) -> Any:
    """Return a value as it is written into a file: a float with few digits, within the bounds."""
    if distribution.kind == sweep_sections.CHOICE:
        return value
    low, high = distribution.bounds
    if distribution.is_whole:
        return min(max(round(value), round(low)), round(high))
    digits = _DIGITS if distribution.step is None else _STEP_DIGITS
    return min(max(float(f"{value:.{digits}g}"), float(low)), float(high))


def examples(parameters: Mapping[str, Distribution]) -> Iterator[dict[str, Any]]:
    """Yield values that together contain each choice and the bounds of each range."""
    for number in range(max((len(distribution.ends) for distribution in parameters.values()), default=0)):
        yield {
            key: rounded(distribution.ends[number % len(distribution.ends)], distribution)
            for key, distribution in parameters.items()
        }


def _hash(*parts: Any) -> int:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)


RUN_ID_LENGTH = 10
#: Part of the id, but not of the training result: a resume may change them and keeps the id.
CHANGEABLE = ("parallel",)


def content_hash(experiment: Job, scaled_by: Iterable[KeyPath] = ()) -> str:
    """Return the SHA-256 of the settings that matter, in hexadecimal.

    Defaults are omitted, so that writing one out, or a new key of a later version, changes nothing.
    ``scaled_by``: keys outside the id that a sweep varies, whose values are included in its runs' ids.
    """
    settings = _identity(experiment, exclude_defaults=True)
    if paths := list(scaled_by):
        whole = experiment.model_dump(mode="json")
        settings["scaled by"] = {dotted(path): value_at(whole, path) for path in paths}
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def run_id(experiment: Job, scaled_by: Iterable[KeyPath] = ()) -> str:
    """Return the id of the run; equal experiments have equal ids. ``scaled_by``: see above."""
    return content_hash(experiment, scaled_by)[:RUN_ID_LENGTH]


def changes_identity(old: Job, new: Job) -> list[str]:
    """Return the dotted keys that ``new`` may not change in a run of ``old``, in file order."""
    before, after = (_identity(experiment, exclude_defaults=False) for experiment in (old, new))
    for key in CHANGEABLE:
        before.pop(key, None)
        after.pop(key, None)
    return list(_differences(before, after))


def _identity(experiment: Job, *, exclude_defaults: bool) -> dict[str, Any]:
    settings = experiment.model_dump(mode="json", exclude_defaults=exclude_defaults)
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        section = settings
        for parent in parents:
            section = section.get(parent, {})
        section.pop(last, None)
    return settings


def _differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the keys in which two dumps differ; ``1`` and ``1.0`` do, as in the hash."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True):
        yield path
