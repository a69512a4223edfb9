"""A plug-in's row of traits is read by validation and planning, which know no strategy by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train import registry
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.experiment.topology.strategy_traits import BUILT_IN, StrategyTraits, taking, traits_of
from tests.config.files import GOOD, problems_of

OWN = StrategyTraits(
    degrees=("shard", "replicate"), rest=("replicate",), spans_node="shard", arguments=("overlap",)
)
NOT_TRAITS = {"degrees": ("shard",)}


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "_traits", lambda kind: {"own": f"{__name__}:OWN", "bad": f"{__name__}:NOT_TRAITS"}
    )
    known = registry.parts("strategies") | {"own": f"{__name__}:OWN"}
    parts = registry.parts
    monkeypatch.setattr(registry, "parts", lambda kind: known if kind == "strategies" else parts(kind))
    monkeypatch.setattr("hpc_train.experiment.validate.part_rules.parts", registry.parts)


def test_a_row_names_a_new_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is all that the package has of it outside of its module."""
    monkeypatch.setitem(BUILT_IN, "sorted", StrategyTraits(degrees=("shard",), implementation="json:loads"))
    assert registry.load("strategies", "sorted") is json.loads
    assert "sorted" in taking("shard")
    assert find_degrees(ParallelConfig(strategy="sorted", shard=4), 8, 4) == Degrees(replicate=2, shard=4)


@pytest.mark.usefixtures("plugged_in")
def test_ranks_are_shared_out_by_a_plug_ins_own_degrees() -> None:
    assert find_degrees(ParallelConfig(strategy="own"), 8, 4) == Degrees(replicate=2, shard=4)
    assert find_degrees(ParallelConfig(strategy="own", shard=2), 8, 4) == Degrees(replicate=4, shard=2)


def test_without_a_row_all_ranks_are_data_parallel() -> None:
    assert traits_of("unheard-of") == StrategyTraits()
    assert find_degrees(ParallelConfig(strategy="unheard-of"), 8, 4) == Degrees(replicate=8)


@pytest.mark.usefixtures("plugged_in")
def test_a_file_is_checked_by_a_plug_ins_row(tmp_path: Path) -> None:
    fine = "parallel={strategy: own, shard: 2, args: {overlap: true}}"
    assert problems_of(tmp_path, GOOD, fine) == []
    wrong = problems_of(tmp_path, GOOD, "parallel={strategy: own, pipeline: 2, args: {overlapp: true}}")
    assert len(wrong) == 2, wrong
    assert "parallel.pipeline: 2 does not apply to strategy own" in wrong[1]
    assert "parallel.args.overlapp: does not apply to strategy own; write overlap" in wrong[0]


@pytest.mark.usefixtures("plugged_in")
def test_a_row_of_another_type_is_refused() -> None:
    with pytest.raises(BadFileError, match="traits of 'bad' are a dict"):
        traits_of("bad")
