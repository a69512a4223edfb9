"""A micro-batch that makes NaN: the run ends, skips the step, or rolls back, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import exit_codes
from hpc_train.run.checkpoints import committed
from tests.end_to_end.holding import Hold
from tests.end_to_end.parts import POISON
from tests.end_to_end.runs import (
    EXPERIMENT,
    Done,
    assert_equal_to_the_bit,
    final_tensors,
    hpc_train,
    last_step,
    only_run,
    rows,
    start,
    status,
    write_experiment,
)

pytestmark = [pytest.mark.slow, pytest.mark.fault(20)]

#: 29 steps per epoch: one or two of these steps meet the poisoned sample.
TEXT = (
    EXPERIMENT.replace("parts:net", "parts:poisoned")
    .replace(", augment: {hflip: 0.5, crop_padding: 2}", "")
    .replace("steps: 30", "steps: 50")
)
assert "poisoned" in TEXT and "augment" not in TEXT
#: Runs under ddp are resumed below.
STRATEGIES = [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"]


def train(folder: Path, *overrides: str, devices: int = 2) -> tuple[RunPaths, Done]:
    experiment = write_experiment(folder, TEXT)
    local = ("--local", "--devices", str(devices))
    done = hpc_train("submit", experiment, *overrides, *local, HPC_TRAIN_RUNS=str(folder / "runs"))
    return only_run(folder), done


def extra(paths: RunPaths) -> dict[str, object]:
    state: dict[str, dict[str, object]] = json.loads(committed(paths)[0].state.read_text())
    return state["extra"]


def are_finite(paths: RunPaths) -> bool:
    tensors = [value for value in final_tensors(paths).values() if isinstance(value, torch.Tensor)]
    return all(bool(value.isfinite().all()) for value in tensors if value.is_floating_point())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_ends_all_ranks_for_good_and_saves_nothing_of_it(strategy: str, tmp_path: Path) -> None:
    paths, done = train(tmp_path, f"parallel.strategy={strategy}")
    assert done.code == 1 and "Traceback" not in done.err
    assert status(paths)["state"] == "failed"
    assert "the train loss is NaN or infinite on a rank" in status(paths)["reason"]
    assert exit_codes(paths.attempt(1)) == {0: 77, 1: 77}, "all agreed; nobody lost a peer"
    assert are_finite(paths)
    finite = [row["loss"] is not None for row in rows(paths, "train")]
    assert all(finite[:-2]) and not finite[-1], "they agree beside the next step, and go no further"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_skip_leaves_the_weights_and_statistics_of_that_step_alone(strategy: str, tmp_path: Path) -> None:
    paths, done = train(tmp_path, "optimization.on_non_finite=skip", f"parallel.strategy={strategy}")
    assert done.code == 0, done.err
    empty = [row["step"] for row in rows(paths, "train") if row["loss"] is None]
    assert 1 <= len(empty) == extra(paths)["skips"]
    assert last_step(paths) == 50 and are_finite(paths)


def test_more_non_finite_steps_than_allowed_end_the_run(tmp_path: Path) -> None:
    overrides = ("optimization.on_non_finite=skip", "optimization.max_non_finite=1", "optimization.steps=60")
    paths, done = train(tmp_path, *overrides)
    assert done.code == 1
    assert "2 times so far; optimization.max_non_finite allows 1" in status(paths)["reason"]
    assert exit_codes(paths.attempt(1)) == {0: 77, 1: 77}


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_stopped_run_resumes_bitwise_past_non_finite_losses(policy: str, tmp_path: Path) -> None:
    """Wherever the run was saved and interrupted, and wherever it went back to."""
    text = f"optimization.on_non_finite={policy}"
    quiet, done = train(tmp_path / "quiet", text, "checkpoint.every_steps=1000")
    assert done.code == 0, done.err
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    experiment = write_experiment(tmp_path, TEXT)
    with Hold(tmp_path, 35) as hold:
        process = start("submit", experiment, text, hold.override, "--local", "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        process.terminate()
        _, err = process.communicate()
        assert process.returncode == 130, err
    assert hpc_train("resume", paths.folder).code == 0
    assert_equal_to_the_bit(quiet, paths)
    assert extra(quiet)["position"] == extra(paths)["position"]
    assert extra(quiet)["skips"] == extra(paths)["skips"]
    assert last_step(paths) == 50 and are_finite(paths)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rollback_skips_the_data_for_good(strategy: str, tmp_path: Path) -> None:
    paths, done = train(tmp_path, "optimization.on_non_finite=rollback", f"parallel.strategy={strategy}")
    assert done.code == 0, done.err
    position = extra(paths)["position"]
    assert isinstance(position, dict) and 1 <= len(position["skipped"]) <= 2
    assert [row["step"] for row in rows(paths, "train")] == list(range(1, 51)), "each step once"
    assert all(row["loss"] is not None for row in rows(paths)) and are_finite(paths)
    assert "going back to the newest checkpoint" in paths.attempt(1).log(0).read_text()


def test_the_replay_of_the_step_that_ends_a_run_skips_what_the_run_has_skipped(tmp_path: Path) -> None:
    """No checkpoint has the first rollback."""
    overrides = ("optimization.on_non_finite=rollback", "optimization.max_non_finite=1")
    more = ("optimization.steps=60", "checkpoint.every_steps=1000")
    paths, done = train(tmp_path, *overrides, *more, devices=1)
    assert done.code == 1 and not committed(paths)
    _, _, command = status(paths)["reason"].partition("hpc-train replay ")
    done = hpc_train("replay", *command.split()[:3], "--json", HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    assert done.code == 0, done.err
    (replay,) = json.loads(done.out)["replays"]
    (last,) = replay["steps"]
    assert last["step"] == int(command.split()[2]) and last["non_finite"] is not None
    assert POISON in [index for batch in last["micro_batches"] for index in batch["samples"]]
    assert replay["first_difference"] is None and replay["compared"] > 0
