"""Precision and torch.compile, seen by what they do rather than by what the file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.loggers.wandb import _named
from hpc_train.run.checkpoints import committed
from hpc_train.run.metric_rows import iter_rows
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    final_tensors,
    only_run,
    rows,
    start,
    submit,
    write_experiment,
)
from tests.loggers.wandb_files import offline_rows, without_images

pytestmark = pytest.mark.slow

CONSTANT = "optimization.schedule={name: constant}"
SHORT = (CONSTANT, "optimization.steps=8", "evaluation.every_steps=8", "model.args={norm: false, dropout: 0}")


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_fp16_keeps_its_loss_scale_in_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    paths = submit(tmp_path, *SHORT, "precision=fp16", f"parallel.strategy={strategy}")
    saved = [json.loads(each.state.read_text())["scaler"] for each in committed(paths)]
    assert [state["_growth_tracker"] for state in saved] == [8, 7], "good steps since the scale last changed"
    assert {state["scale"] for state in saved} == {65536.0}
    assert final_tensors(paths)["model.0.weight"].dtype == torch.float32


@pytest.mark.parametrize(("strategy", "precision", "dtype"), [
    pytest.param("ddp", "bf16", "torch.bfloat16", marks=pytest.mark.soak),
    ("fsdp", "bf16", "torch.bfloat16"),
    ("ddp", "fp16", "torch.float16"),
    ("fsdp", "fp32", "torch.float32"),
    ("ddp", "fp64", "torch.float64"),
])  # fmt: skip
def test_activations_are_of_the_precision_asked_for(
    strategy: str, precision: str, dtype: str, tmp_path: Path
) -> None:
    seen = tmp_path / "dtypes"
    model = f'model={{name: "tests.end_to_end.parts:recording", args: {{path: "{seen}"}}}}'
    devices = 2 if strategy == "fsdp" else 1
    submit(
        tmp_path,
        *SHORT[:3],
        model,
        f"precision={precision}",
        f"parallel.strategy={strategy}",
        devices=devices,
    )
    assert set(seen.read_text().split()) == {dtype}


@pytest.mark.soak
def test_compiled_blocks_train_as_eager_ones_do(tmp_path: Path) -> None:
    eager = submit(tmp_path / "eager", *SHORT, devices=1)
    compiled = submit(tmp_path / "compiled", *SHORT, "compile=true", devices=1)
    frames = [path for path in (compiled.cache / "inductor").rglob("*.cpp") if "kernel" in path.read_text()]
    assert frames, "the compiler wrote no kernel"
    ours, theirs = (torch.tensor([row["loss"] for row in rows(each)]) for each in (eager, compiled))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert final_tensors(eager).keys() == final_tensors(compiled).keys(), "names are those of the plain model"


@pytest.mark.fault(30)
def test_wandb_offline_is_one_id_over_attempts(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    project = "logging.wandb={project: tests, mode: offline}"
    with Hold(tmp_path, 8) as hold:
        process = start("submit", experiment, project, hold.override, "--local", **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        process.send_signal(2)
        _, err = process.communicate()
        assert process.returncode == 130, err
    process = start("resume", paths.folder, **runs)
    _, err = process.communicate()
    assert process.returncode == 0, err
    run_id = json.loads(paths.run.read_text())["wandb_id"]
    files = list(paths.wandb.rglob("*.wandb"))
    assert len(files) == 2
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    assert without_images(offline_rows(newest)) == [_named(row) for row in iter_rows(paths.metrics)]
