"""A run that starts from another one's weights, killed and resumed without them: bitwise identical."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from tests.end_to_end.holding import Hold
from tests.end_to_end.parts import Net
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    final_tensors,
    found_runs,
    hpc_train,
    kill_everything,
    start,
    wait_for,
    write_experiment,
)

pytestmark = pytest.mark.slow

PRETRAINED = ("name=pre", "optimization.steps=25", "evaluation.every_steps=25")
#: All that is fine-tuned is the last block and the head, which is new.
TUNED = (
    "name=tuned",
    "model.init_from=pre",
    'model.freeze=["0.*", "1.0.*"]',
    'optimization.optimizer.groups=[{match: ["3.*"], lr_factor: 3}]',
    "optimization.steps=25",
)


def run_of(folder: Path, name: str) -> RunPaths:
    (found,) = [paths for paths in found_runs(folder) if paths.siblings.folder.name == name]
    return found


def test_a_fine_tuning_run_is_resumed_without_its_source(tmp_path: Path) -> None:
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    file = write_experiment(tmp_path)
    local = ("--local", "--devices", "2")
    done = hpc_train("submit", file, *PRETRAINED, *local, **runs)
    assert done.code == 0, done.err
    source = run_of(tmp_path, "pre")
    done = hpc_train("submit", file, *TUNED, *local, **runs)
    assert done.code == 0, done.err
    assert f"tensors from run {source.folder.name} at step 25" in done.err
    quiet = run_of(tmp_path, "tuned")
    before, after = final_tensors(source), final_tensors(quiet)
    kept = {
        name
        for name, value in before.items()
        if name.startswith("model.") and torch.equal(value, after[name])
    }
    assert {"model.0.weight", "model.1.0.conv.weight", "model.1.0.norm.running_var"} <= kept
    assert not kept & {"model.1.1.conv.weight", "model.1.1.norm.running_var", "model.3.weight"}
    assert "optimizer.0.weight.exp_avg" not in after and "optimizer.3.weight.exp_avg" in after

    other = tmp_path / "other"
    shutil.copytree(source.folder, other / "runs" / "pre" / source.folder.name)
    there = {"HPC_TRAIN_RUNS": str(other / "runs")}
    with Hold(other, 10) as hold:
        process = start("submit", write_experiment(other), *TUNED, hold.override, *local, **there)
        hold.wait(process)
        killed = run_of(other, "tuned")
        wait_for(lambda: bool(committed(killed)), "a checkpoint")
        kill_everything(process, killed)
    process.communicate()
    shutil.rmtree(other / "runs" / "pre")
    done = hpc_train("resume", killed.folder, **there)
    assert done.code == 0, done.err
    assert json.loads(killed.status.read_text())["attempt"] == 2
    assert_equal_to_the_bit(quiet, killed)


def test_a_file_of_weights_is_read_until_the_first_checkpoint(tmp_path: Path) -> None:
    runs, local = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}, ("--local", "--devices", "1")
    file = tmp_path / "weights.safetensors"
    model = Net(10, norm=True, dropout=0.2)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, file)
    overrides = ("optimization.steps=2", "optimization.schedule={name: constant}", "data.augment={}")
    done = hpc_train(
        "submit", write_experiment(tmp_path), *overrides, f"model.pretrained={file}", *local, **runs
    )
    assert done.code == 0 and "weights.safetensors" in done.err, done.err
    (paths,) = found_runs(tmp_path)
    file.unlink()
    for words in (["evaluate", paths.folder], ["resume", paths.folder, "optimization.steps=3"]):
        done = hpc_train(*words, **runs)
        assert done.code == 0, done.err
