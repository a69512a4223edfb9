"""Export: one file of plain weights, from whatever layout, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hpc_train.errors import StorageError, UsageError
from hpc_train.experiment.config.training_sections import LoraConfig, ModelConfig
from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.export import _write, export, main
from hpc_train.training.checkpoint.shards import Entry, write_safetensors
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.fine_tuning import add_lora
from hpc_train.training.train_state import Ema, load_initial_weights
from tests.checkpoint.checkpoint_runs import OddModel, Trainee, begin_attempt, forge, make_run
from tests.run.runs import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = make_run(tmp_path / "run")
    run.run.write_text('{"id": "0123456789"}')
    trainee = Trainee()
    for step in (1, 2):
        trainee.train(1)
        trainee.checkpointer(run).save(trainee.state, step, {})
    return run


def saved_weights() -> dict[str, torch.Tensor]:
    """What a run of plain PyTorch has after the two steps."""
    trainee = Trainee()
    for _ in (1, 2):
        trainee.train(1)
    return dict(trainee.model.state_dict())


def test_the_file_is_the_models_state_dict(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.safetensors"
    export(run, target)
    found, expected = load_file(target), saved_weights()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    OddModel().load_state_dict(found)
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"step": "2", "run_id": "0123456789"}
    said = json.loads(capsys.readouterr().out)
    assert said == {"path": str(target), "step": 2, "tensors": len(expected), "ema": False}


def test_a_damaged_checkpoint_is_passed_over_and_stays_where_it_is(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint(2).shard(0).write_bytes(b"")
    export(run, tmp_path / "out.safetensors")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 1
    assert "step-00000002 is damaged" in captured.err
    assert run.checkpoint(2).folder.is_dir()


def test_the_average_goes_under_the_models_names(run: RunPaths, tmp_path: Path) -> None:
    trainee = Trainee()
    ema = Ema(trainee.model, 0.5)
    trainee.train(1)
    ema.update()
    state = replace(trainee.state, averages=ema.averages)
    trainee.checkpointer(run).save(state, 3, {})
    target = tmp_path / "out.safetensors"
    assert main([str(run.folder), str(target), "--ema"]) == 0
    found = load_file(target)
    OddModel().load_state_dict(found)
    assert torch.equal(found["tied_b.weight"], ema.averages["tied_a.weight"])
    assert not torch.equal(found["tied_b.weight"], trainee.model.tied_a.weight)
    assert all(torch.equal(found[name], value) for name, value in ema.averages.items())
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["weights"] == "ema"


def test_the_best_checkpoint_is_exported_unless_another_is_requested(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.safetensors"
    command = [str(run.folder), str(target)]

    def step_of(*options: str) -> int:
        assert main([*command, *options]) == 0
        return int(json.loads(capsys.readouterr().out)["step"])

    assert main([*command, "--best"]) == 2
    assert "has no best checkpoint; omit --best, or train with" in capsys.readouterr().err
    assert step_of() == 2
    trainee = Trainee()
    best = {"best": {"metric": "loss", "value": 0.5, "step": 1}}
    trainee.checkpointer(run).save(trainee.state, 3, best)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 1
    assert "the best checkpoint, loss 0.5 at step 1 (--last: step 3)" in captured.err
    assert [step_of("--best"), step_of("--last"), step_of("--step", "2")] == [1, 3, 2]
    run.checkpoint(1).shard(0).write_bytes(b"")
    assert main(command) == 74
    assert "step-00000001 is damaged" in (error := capsys.readouterr().err) and "--last uses" in error
    assert step_of("--last") == 3
    shutil.rmtree(run.checkpoint(1).folder)
    assert main(command) == 2
    assert "there is no checkpoint of step 1; there are 3, 2" in capsys.readouterr().err


def test_the_ema_weights_are_exported_if_the_best_is_chosen_by_them(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainee = Trainee()
    averages = {name: value + 1 for name, value in Ema(trainee.model, 0.5).averages.items()}
    best = {"best": {"metric": "ema_loss", "value": 0.5, "step": 3}}
    trainee.checkpointer(run).save(replace(trainee.state, averages=averages), 3, best)
    target = tmp_path / "out.safetensors"
    for options, is_ema in ([], True), (["--no-ema"], False):
        assert main([str(run.folder), str(target), *options]) == 0
        assert json.loads(capsys.readouterr().out)["ema"] == is_ema
        expected = averages if is_ema else dict(trainee.model.named_parameters())
        assert torch.equal(load_file(target)["tied_b.weight"], expected["tied_a.weight"])


def test_a_run_without_an_average_exports_none(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.folder), str(tmp_path / "out.safetensors"), "--ema"]) == 2
    assert "has no average of its weights (optimization.ema)" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.slow
def test_it_runs_as_a_module_and_replaces_the_target(run: RunPaths, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_text("old")
    command = [sys.executable, "-m", "hpc_train.training.checkpoint.export", str(run.folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["step"] == 2
    assert load_file(target)


def all_damaged(run: RunPaths) -> None:
    for step in (1, 2):
        run.checkpoint(step).shard(0).unlink()


def none_saved(run: RunPaths) -> None:
    for checkpoint in run.checkpoint_folders():
        checkpoint.folder.rename(run.folder / checkpoint.folder.name)


def forged(run: RunPaths) -> None:
    forge(run.checkpoint(2), tensors={"model.x": "\x1b[2J"})


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (all_damaged, 74, "every checkpoint is damaged"),
        (none_saved, 2, "no checkpoint yet"),
        (forged, 65, "state.json is not as hpc-train writes it"),
    ],
)
def test_what_can_not_be_exported_is_reported(  # type: ignore[no-untyped-def]
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil, code: int, said: str
) -> None:
    spoil(run)
    target = tmp_path / "out.safetensors"
    target.write_text("old")
    assert main([str(run.folder), str(target)]) == code
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and "\x1b" not in captured.err
    assert target.read_text() == "old"


@pytest.mark.parametrize("target", ["no/such/folder/out", "folder"])
def test_a_target_that_can_not_be_written_is_reported(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (tmp_path / "folder").mkdir()
    assert main([str(run.folder), str(tmp_path / target)]) == 74
    said = capsys.readouterr().err
    assert str(tmp_path / target) in said
    assert ("make the folder" in said) == ("no/such" in target) != ("not a plain file" in said)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_wrong_arguments_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "RUN_FOLDER TARGET" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "socket"])
def test_what_is_not_a_plain_file_is_not_replaced(run: RunPaths, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "link":
        target.symlink_to(tmp_path / "other")
    elif kind == "folder":
        target.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:  # represents a device, which a failure would replace
            server.bind(str(target))
    before = target.lstat()
    with pytest.raises(StorageError, match="not a plain file"):
        export(run, target)
    assert (target.lstat().st_mode, target.lstat().st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("name", ["run.json", "new.safetensors", "checkpoints/new.safetensors"])
def test_nothing_is_written_into_a_run_folder(run: RunPaths, name: str) -> None:
    run.experiment.touch()
    before = run.run.read_text()
    with pytest.raises(UsageError, match="inside run folder"):
        export(run, run.folder / name)
    assert run.run.read_text() == before


def test_the_name_of_an_export_may_be_as_long_as_the_disk_allows(tmp_path: Path) -> None:
    target = tmp_path / ("w" * 243 + ".safetensors")
    _write(target, lambda path: write_safetensors(path, {"a": Entry.of(torch.ones(2))}, {}))
    assert load_file(target)["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_adapters_are_merged_into_the_plain_models_weights(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["0"], "alpha": 6.0, "also_train": ["1.*"]}
    run = small_run(tmp_path, model={"name": "tests:net", "lora": lora})
    begin_attempt(run, 1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    add_lora(model, LoraConfig.model_validate(lora))
    nn.init.normal_(model.get_parameter("0.lora_b"))
    trainee = Trainee()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainee.checkpointer(run).save(TrainingState(model, optimizer), 1, {})
    export(run, tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == expected.keys()
    expected["0.weight"] += 3 * model.get_parameter("0.lora_b") @ model.get_parameter("0.lora_a")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)

    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    config = ModelConfig(name="tests:net", init_from=str(run.folder))
    load_initial_weights(plain, config, DataInfo(3, 4, (), ()))
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())
