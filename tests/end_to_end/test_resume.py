"""Killed in the middle of an epoch and resumed: bitwise identical to an uninterrupted run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from hpc_train.run.digests import read_digests
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    COMPILED,
    OWN_TASK,
    assert_equal_to_the_bit,
    hpc_train,
    kill_everything,
    last_step,
    only_run,
    rows,
    start,
    status,
    write_experiment,
)
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

SHORT = ("optimization.schedule={name: constant}", "optimization.steps=7")


def submit_with_kills(folder: Path, kill_at: list[int], *overrides: str, devices: int = 2) -> RunPaths:
    """Submit, and SIGKILL launcher and ranks after each of these steps; loader processes come and go."""
    runs = {"HPC_TRAIN_RUNS": str(folder / "runs")}
    what: tuple[str | Path, ...] = ("submit", write_experiment(folder), *overrides)
    what += ("--local", "--devices", str(devices))
    with Hold(folder, kill_at[0]) as hold:
        for number, step in enumerate(kill_at):
            hold.at(step)
            process = start(*what, hold.override, **runs)
            hold.wait(process)
            paths = only_run(folder)
            assert last_step(paths) == step and len(paths.attempt_folders()) == number + 1
            kill_everything(process, paths)
            process.communicate()
            assert status(paths)["state"] == "running", "nobody was left to write an end"
            what = ("resume", paths.folder, f"data.workers={2 if number % 2 == 0 else 0}")
    process = start(*what, **runs)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return paths


@pytest.mark.fault(16, 48)
@pytest.mark.parametrize(("strategy", "num_kills"), [("ddp", 3), ("fsdp", 2)])
def test_a_run_killed_several_times_is_bitwise_identical(
    strategy: str, num_kills: int, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    overrides = (f"parallel.strategy={strategy}",)
    quiet = quiet_runs.of(*overrides)
    steps = sorted(random.Random(strategy).sample(range(2, 28), num_kills))
    killed = submit_with_kills(tmp_path / "killed", steps, *overrides)
    assert status(killed)["attempt"] == num_kills + 1
    assert_equal_to_the_bit(quiet, killed)
    digests, expected = (list(read_digests(run.digests)) for run in (killed, quiet))
    assert [digest.step for digest in digests] == list(range(1, 31))
    assert [one.differences(other) for one, other in zip(digests, expected, strict=True)] == [[]] * 30


@pytest.mark.fault(16)
def test_a_killed_run_of_an_own_task_is_bitwise_identical(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """Under fsdp; tests/slurm/test_end_to_end.py preempts one under ddp."""
    overrides = (*OWN_TASK, "parallel.strategy=fsdp")
    quiet = quiet_runs.of(*overrides)
    killed = submit_with_kills(tmp_path / "killed", [9], *overrides)
    assert_equal_to_the_bit(quiet, killed)


@pytest.mark.fault(16)
def test_a_run_killed_on_three_ranks_is_bitwise_identical(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """Three ranks share four micro-batches: spare slots, and sums whose order may depend on DDP's buckets."""
    quiet = quiet_runs.of(ranks=3)
    killed = submit_with_kills(tmp_path / "killed", [25], devices=3)
    assert_equal_to_the_bit(quiet, killed)


def test_a_run_with_an_own_transform_and_mixup_is_bitwise_identical(
    quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    mixed = ("optimization.mixup=0.8", "optimization.cutmix=1.0", "optimization.label_smoothing=0.1")
    transform = "data.transform=tests.end_to_end.parts:noise"
    overrides = ("optimization.schedule={name: constant}", "optimization.steps=12", transform, *mixed)
    killed = submit_with_kills(tmp_path, [9], *overrides)
    assert_equal_to_the_bit(quiet_runs.of(*overrides), killed)
    assert all(0 <= row["accuracy"] <= 1 for row in rows(killed)), "of train and val"


@pytest.mark.fault(16)
def test_a_loss_scale_survives_a_kill(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """Under fp16 the scale grows and shrinks with the gradients seen so far: it is state as well."""
    overrides = ("precision=fp16",)
    quiet = quiet_runs.of(*overrides, ranks=1)
    killed = submit_with_kills(tmp_path / "killed", [17], *overrides, devices=1)
    assert_equal_to_the_bit(quiet, killed)


@pytest.mark.fault(16, 43)
def test_a_compiled_run_is_resumed_from_the_caches_in_its_folder(
    quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Bitwise identical, with evaluations on both sides of the kill; nothing is compiled into a home."""
    quiet = quiet_runs.of(*COMPILED, ranks=1)
    killed = submit_with_kills(tmp_path / "killed", [5], *COMPILED, devices=1)
    assert_equal_to_the_bit(quiet, killed)
    assert any((killed.cache / "inductor").rglob("*.so"))
    first, last = (read_record(killed.attempt(number)) for number in (1, 2))
    assert first is not None and last is not None
    file = json.loads(killed.attempt(2).record.read_text())  # alone, without rank 0's events
    assert file["first_step"] == last.first_step and file["events"] == last.events
    assert file["save_s"] > 0 and file["checkpoint_stall_s"] > 0
    assert first.first_step.keys() == {"data_s", "compile_s", "run_s", "graphs", "cached_graphs"}
    assert first.first_step["compile_s"] > 0
    assert first.first_step["cached_graphs"] < first.first_step["graphs"]
    assert last.first_step["cached_graphs"] == last.first_step["graphs"] > 0, (first, last)


@pytest.mark.fault(6)
def test_a_run_killed_before_its_first_checkpoint_starts_again(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    overrides = ("optimization.schedule={name: constant}", "optimization.steps=8")
    quiet = quiet_runs.of(*overrides)
    killed = submit_with_kills(tmp_path / "killed", [1], *overrides)
    assert_equal_to_the_bit(quiet, killed)


def test_another_seed_gives_another_run(quiet_runs: QuietRuns) -> None:
    """What the tests above compare does differ where it should."""
    one, other = quiet_runs.of(*SHORT), quiet_runs.of(*SHORT, "seed=4")
    with pytest.raises(AssertionError, match="differs"):
        assert_equal_to_the_bit(one, other)


def test_resume_of_a_completed_run_starts_nothing(quiet_runs: QuietRuns) -> None:
    paths = quiet_runs.of(*SHORT)
    done = hpc_train("resume", paths.folder)
    assert done.code == 0
    assert len(paths.attempt_folders()) == 1
