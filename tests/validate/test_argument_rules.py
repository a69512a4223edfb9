"""``data.args`` and ``model.args`` are checked before a run is queued, at their place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.fields import PositiveInt, Section
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import misplaced
from hpc_train.experiment.data_facts.facts import DataFacts
from hpc_train.experiment.validate import model_facts
from hpc_train.training.strategies import model_facts as facts_of_models
from tests.config.files import GOOD, code_and_key, problems_of

LACKING = Problem(("data", "root"), "has no stripes", "paint some")


class StripesArgs(Section):
    """What a data set of a plug-in takes."""

    width: PositiveInt = 3


def test_the_facts_of_a_plug_in_say_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DataFacts("images", "class", args=StripesArgs, layout=lambda root: LACKING)
    monkeypatch.setattr("hpc_train.experiment.data_facts.by_name.load_traits", lambda kind, name: facts)
    monkeypatch.setattr("hpc_train.registry._plug_ins", lambda kind: {"stripes": "acme.stripes:build"})
    (said,) = problems_of(tmp_path, GOOD, "data={name: stripes, args: {widht: 2}}")
    assert code_and_key(said) == ("data.arguments", "data.args.widht") and "'width'?" in said
    assert problems_of(tmp_path, GOOD, "data={name: stripes, args: {width: 2}}") == []
    assert misplaced(DataConfig(name="stripes", root=str(tmp_path))) == LACKING


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that the child process is asked about."""
    found: list[str] = []

    def facts(name: str, args: dict[str, Any], image_size: object = None) -> dict[str, Any]:
        found.append(f"{name} {args}")
        refusal = f"model.args: {name} takes no argument 'drop'; did you mean 'drop_rate'?"
        return {"args_refusal": refusal} if "drop" in args else {}

    monkeypatch.setattr(model_facts, "facts", facts)
    monkeypatch.setattr(model_facts, "known_names", lambda kind: ["resnet18"])
    model_facts._refusals.clear()
    return found


def test_a_sweep_of_an_argument_asks_once(asked: list[str]) -> None:
    for rate in (0.1, 0.2, 0.3):
        assert model_facts.args_refusal("timm/resnet18", {"drop_rate": rate}) is None
    assert len(asked) == 1


def test_the_child_names_an_argument_that_the_model_does_not_take() -> None:
    refusal = "model.args: timm/resnet18 takes no argument 'drop_ratee'; did you mean 'drop_rate'?"
    assert facts_of_models.answer("timm/resnet18", {"drop_ratee": 0.1}) == {"args_refusal": refusal}
    assert facts_of_models.answer("timm/resnet18", {"drop_rate": 0.1})["has_batchnorm"] is True
