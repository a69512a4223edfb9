"""The values of a sweep's runs: all combinations of grid, list and draws, except excluded ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.config.problems import KeyPath
from hpc_train.config.sweep_sections import (
    SweepConfig,
    parameters_place,
    varied,
)
from hpc_train.plan.draws import draws, examples


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
    parts = (list(_listed(sweep)), list(_drawn(sweep, trials)), list(_grid(sweep)))
    for listed, drawn, gridded in itertools.product(*parts):
        whole = listed | drawn | gridded
        values = varied(sweep.parameters, whole.values)
        if not sweep.is_excluded(values):
            yield Combination(values, {key: whole.places[key] for key in values})


def _grid(sweep: SweepConfig) -> Iterator[Combination]:
    for choice in itertools.product(*(enumerate(values) for values in sweep.grid.values())):
        chosen = list(zip(sweep.grid, choice, strict=True))
        yield Combination(
            {key: value for key, (_, value) in chosen},
            {key: ("sweep", "grid", key, index) for key, (index, _) in chosen},
        )


def _listed(sweep: SweepConfig) -> Iterator[Combination]:
    for index, overrides in enumerate(sweep.list or [{}]):
        yield Combination(overrides, {key: ("sweep", "list", index, key) for key in overrides})


def _drawn(sweep: SweepConfig, trials: Sequence[Mapping[str, Any]] | None) -> Iterator[Combination]:
    if sweep.search is not None:
        found: Iterator[Mapping[str, Any]] = iter(
            examples(sweep.search.parameters) if trials is None else trials
        )
    else:
        found = draws(sweep.random) if sweep.random else iter([{}])
    place = parameters_place(sweep)
    for values in found:
        yield Combination(values, {key: (*place, key) for key in values})
