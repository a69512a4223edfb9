"""Which runs a search starts next, whatever its method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.sweep_sections import SearchConfig
from hpc_train.search.base import Trial
from hpc_train.search.proposals import next_round
from tests.search import methods

_SEED = {"seed": {"int": [0, 9]}}


@pytest.fixture(autouse=True)
def _no_requests() -> Iterator[None]:
    methods.requests.clear()
    yield
    methods.requests.clear()


def _search(method: str = methods.COUNTING, **changes: Any) -> SearchConfig:
    data = {"method": method, "trials": 6, "metric": "accuracy", "mode": "max", "parameters": _SEED}
    return SearchConfig.model_validate({**data, "max_concurrent": 3, **changes})


def _trials(*states: str) -> list[Trial]:
    return [
        Trial({"seed": number}, state, 0.5 if state == "finished" else None)  # type: ignore[arg-type]
        for number, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "seeds"),
    [
        ([], [0, 1, 2]),
        (["running"], [1, 2]),
        (["running"] * 3, []),
        (["finished", "failed", "diverged"], [3, 4, 5]),
        (["finished"] * 4, [4, 5]),
        (["finished"] * 6, []),
        (["running"] * 4, []),
    ],
)
def test_as_many_runs_are_started_as_are_missing(states: list[str], seeds: list[int]) -> None:
    assert next_round(_search(), _trials(*states)).proposals == [{"seed": seed} for seed in seeds]


def test_the_same_trials_have_the_same_request_and_other_trials_another_seed() -> None:
    for trials in (_trials(), _trials(), _trials("finished")):
        next_round(_search(), trials)
    first, again, later = methods.requests
    assert first == again and first.seed != later.seed
    next_round(_search(seed=1), _trials())
    assert methods.requests[-1].seed != first.seed


def test_proposals_that_repeat_a_trial_are_dropped_and_asked_for_again() -> None:
    made = next_round(_search(methods.STUBBORN), _trials("finished"))
    assert made.proposals == [], "seed 0 is there"
    assert len({request.seed for request in methods.requests}) == len(methods.requests) == 10
    assert next_round(_search(methods.STUBBORN), []).proposals == [{"seed": 0}]
    assert [trial.state for trial in methods.requests[-1].trials] == ["running"], "knows the first one"


def test_excluded_values_are_not_proposed() -> None:
    parameters = {"data.args.x": {"choice": [1, 2]}}
    search = _search(methods.STUBBORN, parameters=parameters)
    assert next_round(search, []).proposals == [{"data.args.x": 1}]
    assert next_round(search, [], lambda values: values["data.args.x"] == 1).proposals == []


def test_numbers_are_rounded_and_parameters_without_their_condition_dropped() -> None:
    parameters = {
        "a": {"uniform": [0.123456789, 1]},
        "b": {"choice": ["x", "y"]},
        "c": {"int": [1, 2], "when": {"b": "y"}},
    }
    (values,) = next_round(_search(methods.STUBBORN, parameters=parameters), []).proposals
    assert values == {"a": 0.123457, "b": "x"}


def test_a_method_that_leaves_the_space_is_refused() -> None:
    with pytest.raises(BadFileError, match=r"sweep.search.method: .*:wrong proposes seed=-5, which is"):
        next_round(_search(methods.WRONG, parameters={"seed": {"choice": [1, 2]}}), [])


def test_the_best_trial_is_the_first_of_the_best() -> None:
    trials = [Trial({"seed": n}, "finished", value, str(n)) for n, value in enumerate([0.3, 0.9, 0.9, 0.1])]
    made = next_round(_search(), [*trials, Trial({"seed": 7}, "running")])
    best, lowest = made.best("max"), made.best("min")
    assert best is not None and lowest is not None
    assert (best.run_id, lowest.run_id) == ("1", "3")


@pytest.mark.parametrize(
    ("states", "due", "again", "seeds"),
    [
        (["running"], {0}, [0], [1, 2]),
        (["failed"], {0}, [], [1, 2, 3]),
        (["failed", "running", "running"], {0, 1}, [1], [3]),
        (["failed", "failed", "running", "finished", "finished"], {0, 1, 2}, [2, 0], [5]),
        (["running"] * 6, {0, 1, 2, 3, 4}, [0, 1], []),
        (["failed"] * 6, {1, 2, 3, 4}, [1, 2, 3], []),
    ],
)
def test_interrupted_trials_start_before_new_ones_and_failed_ones_after_them(
    states: list[str], due: set[int], again: list[int], seeds: list[int]
) -> None:
    trials = [replace(trial, is_due=number in due) for number, trial in enumerate(_trials(*states))]
    made = next_round(_search(), trials)
    assert [trial.values["seed"] for trial in made.again] == again
    assert [values["seed"] for values in made.proposals] == seeds
    assert len(made.starts) <= 3 - made.running
