"""A run that keeps an average of its weights: its rows, its interruptions, its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import assert_equal_to_the_bit, final_tensors, hpc_train, rows
from tests.end_to_end.test_non_finite import are_finite
from tests.end_to_end.test_non_finite import train as train_poisoned
from tests.end_to_end.test_resume import submit_with_kills
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

EMA = (
    "model.name=tests.end_to_end.parts:layered",
    "optimization.ema={decay: 0.9}",
    "optimization.optimizer.layer_decay=0.7",
    "optimization.steps=21",
    "optimization.schedule={name: constant}",
    "evaluation.every_steps=5",
)


def check_rows(paths: RunPaths) -> None:
    validated = rows(paths, "val")
    assert [row["step"] for row in validated] == [5, 10, 15, 20, 21]
    for row in validated:
        assert {"ema_loss", "ema_accuracy"} < row.keys()
        assert row["ema_loss"] != row["loss"]
    # Training is fast and the average slow.
    assert validated[0]["ema_loss"] > validated[0]["loss"]


def check_export(paths: RunPaths, folder: Path) -> None:
    targets = folder / "weights.safetensors", folder / "average.safetensors"
    for target, options in zip(targets, ([], ["--ema"]), strict=True):
        done = hpc_train("export", paths.folder, "-o", target, *options)
        assert done.code == 0, done.err
    weights, averages = map(load_file, targets)
    assert weights.keys() == averages.keys()
    held = final_tensors(paths)
    for name, value in averages.items():
        assert torch.equal(value, held[f"ema.{name}"]), name
        assert torch.equal(weights[name], held[f"model.{name}"]), name
        # Counts of BatchNorm are no averages.
        assert torch.equal(value, weights[name]) != value.is_floating_point(), name


def test_an_interrupted_average_equals_the_uninterrupted_runs_bitwise(
    quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    overrides = ("parallel.strategy=fsdp", *EMA)
    quiet = quiet_runs.of(*overrides)
    killed = submit_with_kills(tmp_path / "killed", [11], *overrides)
    assert_equal_to_the_bit(quiet, killed)
    check_rows(quiet)
    check_export(killed, tmp_path)


def test_a_skipped_step_leaves_the_average_alone(tmp_path: Path) -> None:
    """Its forward made NaN of BatchNorm's statistics, which are put back only afterwards."""
    overrides = ("optimization.on_non_finite=skip", "optimization.ema={decay: 0.9}")
    paths, done = train_poisoned(tmp_path, *overrides, devices=1)
    assert done.code == 0, done.err
    assert any(row["loss"] is None for row in rows(paths, "train"))
    assert are_finite(paths) and "ema.1.0.norm.running_mean" in final_tensors(paths)
