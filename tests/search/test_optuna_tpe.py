"""``method: tpe`` with the real Optuna."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hpc_train.experiment.config.sweep_sections import SearchConfig
from hpc_train.search.base import Trial
from hpc_train.search.optuna_tpe import MissingOptunaError
from hpc_train.search.proposals import next_round

#: Optuna's import, by the first test.
pytestmark = pytest.mark.slow

PARAMETERS = {
    "lr": {"log_uniform": [1e-4, 1.0]},
    "decay": {"uniform": [0, 0.1], "step": 0.03},
    "width": {"log_int": [8, 64]},
    "steps": {"int": [0, 10], "step": 3},
    "name": {"choice": ["sgd", "adamw", {"name": "own"}]},
    "momentum": {"uniform": [0.5, 0.9], "when": {"name": "sgd"}},
}


def _search(**changes: Any) -> SearchConfig:
    data = {"trials": 100, "metric": "loss", "mode": "min", "max_concurrent": 5, "parameters": PARAMETERS}
    return SearchConfig.model_validate(data | changes)


def _loss(values: dict[str, Any]) -> float:
    return abs(values["lr"] - 0.01) + 0.1 * (values["name"] != "sgd")


def _rounds(search: SearchConfig, count: int) -> list[Trial]:
    trials: list[Trial] = []
    for _ in range(count):
        made = next_round(search, trials)
        assert next_round(search, trials).proposals == made.proposals, "the same trials, the same proposals"
        trials += [Trial(values, "finished", _loss(values)) for values in made.proposals]
    return trials


def test_all_distributions_and_conditions_are_proposed_and_learned_from() -> None:
    trials = _rounds(_search(), 12)
    assert len(trials) == 60
    for trial in trials:
        values = trial.values
        assert 1e-4 <= values["lr"] <= 1 and float(f"{values['lr']:.6g}") == values["lr"]
        assert values["decay"] in {0.0, 0.03, 0.06, 0.09}
        assert values["steps"] in {0, 3, 6, 9} and 8 <= values["width"] <= 64
        assert ("momentum" in values) == (values["name"] == "sgd")
    early, late = trials[:10], trials[-20:]
    assert sum(trial.values["name"] == "sgd" for trial in late) > 12
    mean = [sum(trial.value or 0.0 for trial in some) / len(some) for some in (early, late)]
    assert mean[1] < mean[0] / 2


def test_running_failed_and_diverged_trials_are_taken_into_account() -> None:
    def trials(state: str) -> list[Trial]:
        lr = {"lr": {"uniform": [0, 1]}}
        made = [Trial({"lr": number / 20}, "finished", 1 - number / 20) for number in range(12)]
        search = _search(parameters=lr, max_concurrent=90)
        near = [Trial({"lr": 0.55 + number / 100}, state) for number in range(8)]  # type: ignore[arg-type]
        return [Trial(values, "running") for values in next_round(search, made + near).proposals[:40]]

    means = {
        state: sum(trial.values["lr"] for trial in trials(state)) / 40 for state in ("failed", "diverged")
    }
    assert means["diverged"] != means["failed"]
    assert len({trial.values["lr"] for trial in trials("running")}) == 40, "a batch differs"


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingOptunaError, match=r"pip install 'hpc-train\[optuna\]'"):
        next_round(_search(), [])
