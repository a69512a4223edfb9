from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.create import create_run, inputs_differ, note_inputs
from hpc_train.run.weight_source import described, find_source, pinned, without_files
from tests.run.runs import small_experiment, small_run
from tests.run.test_checkpoints import change_manifest, write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> RunPaths:
    run = small_run(tmp_path / "runs")
    for step in (5, 10):
        write_checkpoint(run, step, attempt=0)
    return run


def tuned(source: RunPaths, init_from: str = "small") -> tuple[RunPaths, Experiment]:
    """Create a run that starts from ``source``; return it and what ``run.json`` has."""
    paths = RunPaths(source.siblings.folder.with_name("tuned") / "def")
    experiment = small_experiment(name="tuned", model={"name": "timm/resnet18", "init_from": init_from})
    assert create_run(paths, experiment, "def", 10)
    return paths, experiment


@pytest.mark.parametrize("word", ["small", "abc", "small/abc", "folder"])
def test_a_run_means_its_newest_checkpoint_or_its_best(word: str, source: RunPaths) -> None:
    found = find_source(str(source.folder) if word == "folder" else word)
    assert found == source.checkpoint(10).folder
    assert find_source(str(found)) == found
    assert described(found) == "run abc at step 10"
    change_manifest(source.checkpoint(10), best={"metric": "loss", "value": 0.5, "step": 5})
    assert find_source("abc") == source.checkpoint(5).folder


def test_a_file_is_known_by_its_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pt").write_bytes(b"weights")
    assert find_source("w.pt") == tmp_path / "w.pt"
    assert described(tmp_path / "w.pt") == str(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("w.safetensors", "there is no file w.safetensors; write an existing path, or a run"),
        ("smal", "smal: no run or experiment of this name .*did you mean small.*; a file of weights ends in"),
        ("empty", ".*ghi: this run has no checkpoint yet; try again once it has saved one"),
        ("two", "two has 2 runs; write one of "),
    ],
)
def test_what_names_no_weights_is_refused(word: str, message: str, source: RunPaths) -> None:
    root = source.siblings.folder.parent
    for name, run_id in (("empty", "ghi"), ("two", "jkl"), ("two", "mno")):
        create_run(RunPaths(root / name / run_id), small_experiment(name=name), run_id, 10)
    with pytest.raises(BadFileError, match=rf"(?s)^model\.init_from: {message}"):
        find_source(word)


def test_ranks_read_the_checkpoint_that_was_newest_when_the_run_was_created(source: RunPaths) -> None:
    paths, experiment = tuned(source)
    write_checkpoint(source, 15, attempt=0)
    assert pinned(paths, experiment).model.init_from == str(source.checkpoint(10).folder)
    assert inputs_differ(paths, experiment) == ["model.init_from"]


def test_weights_that_are_gone_or_changed_are_refused(source: RunPaths) -> None:
    paths, experiment = tuned(source)
    manifest = source.checkpoint(10).manifest
    text = manifest.read_text()
    for changed in (text.replace('"attempt"', '"Attempt"'), None):
        manifest.unlink() if changed is None else manifest.write_text(changed)
        with pytest.raises(BadFileError, match=r"^model.init_from: .*step-00000010 is not what it was when"):
            pinned(paths, experiment)
    assert inputs_differ(paths, small_experiment(model={"name": "timm/resnet18", "init_from": "gone"})) == []


def test_a_run_without_source_is_not_created(source: RunPaths) -> None:
    with pytest.raises(BadFileError, match=r"^model.init_from: there is no file"):
        tuned(source, "nowhere.pth")
    assert not (source.siblings.folder.with_name("tuned") / "def").exists()


def test_a_resume_takes_the_newest_weights_only_if_nothing_was_saved(source: RunPaths) -> None:
    paths, experiment = tuned(source)
    write_checkpoint(source, 15, attempt=0)
    note_inputs(paths, experiment, has_saved=True)
    assert json.loads(paths.run.read_text())["init_from"].endswith("step-00000010")
    note_inputs(paths, experiment, has_saved=False)
    assert json.loads(paths.run.read_text())["init_from"].endswith("step-00000015")
    assert inputs_differ(paths, experiment) == []


def test_a_file_of_pretrained_weights_that_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"one")
    experiment = small_experiment(model={"name": "timm/resnet18", "pretrained": str(file)})
    paths = RunPaths(tmp_path / "runs" / "small" / "abc")
    create_run(paths, experiment, "abc", 10)
    assert pinned(paths, experiment) == experiment
    for changed in (b"two", None):
        file.unlink() if changed is None else file.write_bytes(changed)
        with pytest.raises(
            BadFileError, match=r"^model.pretrained: .*weights.safetensors is not what it was"
        ):
            pinned(paths, experiment)
    assert without_files(experiment).model.pretrained is False
