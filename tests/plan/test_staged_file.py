"""Stages of a file: which run each one is, and which run it follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment, Program
from hpc_train.experiment.plan.staged_file import StagedFile, load_stages, name_of
from hpc_train.experiment.validate.loading import load
from tests.config.files import GOOD

STAGES = "stages: [{seed: 1}, {model: {init_from: stage}}, {evaluate: true}, {export: w.pt}, tune.yaml]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tune = GOOD.replace("name: digits-test", "name: tuned", 1).replace(
        "model:\n", "model:\n  init_from: stage\n", 1
    )
    (tmp_path / "tune.yaml").write_text(tune)
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD + STAGES)
    return path


def test_a_stage_follows_the_one_before_and_reads_the_training_stage_before(file: Path) -> None:
    stages = load_stages(file)
    names = [name_of(loaded) for loaded in stages]
    facts = [loaded.stage for loaded in stages]
    assert [stage and stage.after for stage in facts] == [None, *names[:-1]]
    assert [stage and stage.weights for stage in facts] == [None, names[0], names[1], names[1], names[1]]
    kinds = [type(loaded.experiment) for loaded in stages]
    assert kinds == [Experiment, Experiment, Program, Program, Experiment]
    tuned = stages[-1].experiment
    assert isinstance(tuned, Experiment) and tuned.model.init_from == names[1]


def test_another_first_stage_makes_other_runs_of_all_that_load_its_weights(file: Path) -> None:
    before = [name_of(loaded) for loaded in load_stages(file)]
    file.write_text(file.read_text().replace("{seed: 1}", "{seed: 2}"))
    after = [name_of(loaded) for loaded in load_stages(file)]
    assert not set(before) & set(after)


def test_the_command_line_changes_all_training_stages(file: Path) -> None:
    stages = load_stages(file, ["optimization.epochs=7"])
    lengths = [s.experiment.optimization.epochs for s in stages if isinstance(s.experiment, Experiment)]
    assert lengths == [7, 7, 7]


def test_a_run_of_another_name_than_planned_is_followed(file: Path) -> None:
    staged = StagedFile(file)
    staged.load_all()
    again = staged.load(1, "digits/abc-2", "digits/abc-2")
    assert again.data["model"]["init_from"] == "digits/abc-2"


def test_a_file_without_stages_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    (loaded,) = load_stages(path)
    assert loaded.stage is None and loaded.experiment == load(path).experiment


def test_commands_on_one_experiment_refuse_the_file(file: Path) -> None:
    with pytest.raises(BadFileError, match=r"exp.yaml:\d+:\d+: stages: has several runs"):
        load(file)
