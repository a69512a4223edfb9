"""What ``plan`` says of time and cost, and the budget of GPU-hours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.plan_cost import cost_of, over_budget_lines
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import runs_root
from tests.cli.commands import hpc_train
from tests.report.made_runs import made_sweep

_ON_4_GPUS = ("slurm={gpus_per_node: 4, time_limit: 2h}", "device=auto", "optimization.epochs=30")
_THROUGHPUT = ("--throughput", "0.016")


def cost(*arguments: str | Path) -> dict[str, Any]:
    done = hpc_train("plan", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["cost"]
    return found


def test_without_measured_runs_nothing_is_predicted(file: Path) -> None:
    done = hpc_train("plan", file)
    assert "predicted" not in done.out + done.err
    (run,) = cost(file)["runs"]
    assert (run["duration_s"], run["gpu_hours"], run["measured_runs"]) == (None, None, [])


def test_a_given_throughput_is_that_of_each_rank(file: Path) -> None:
    # 90 steps of 8 samples per rank, 500 s each: 12.5 h, in attempts of 2 h less the time to save.
    done = hpc_train("plan", file, *_ON_4_GPUS, *_THROUGHPUT)
    heads, cells = done.out.splitlines()
    assert "predicted time  predicted GPU-hours" in heads and "12h30m" in cells
    assert "predicted by the given samples per second of a rank" in done.err
    assert "time: 7 attempts, by the time limit of a job" in done.err
    found = cost(file, *_ON_4_GPUS, *_THROUGHPUT)
    (run,) = found["runs"]
    assert (run["step_s"], run["attempts"]) == (500.0, 7)
    assert found["gpu_hours"] == run["gpu_hours"] == pytest.approx(4 * 12.5)
    two = hpc_train("plan", file, *_ON_4_GPUS, *_THROUGHPUT, "sweep.grid={seed: [1, 2]}")
    assert "all 2 runs together: 100 GPU-hours" in two.err


def test_earlier_runs_predict_the_next(tmp_path: Path) -> None:
    """0.945 s for one micro-batch of 4 samples per rank: four take four times as long."""
    (made,) = made_sweep(runs_root(), 1, steps=100)
    file = tmp_path / "next.yaml"
    file.write_text(made.resolved.read_text())  # JSON is YAML
    size = ("optimization.global_batch_size=128", "optimization.steps=1000", "name=other")
    (run,) = cost(file, *size, "--local", "--devices", "8")["runs"]
    assert run["measured_runs"] == [made.folder.name]
    assert run["step_s"] == pytest.approx(4 * 0.945, rel=0.1)
    done = hpc_train("plan", file, *size, "--local", "--devices", "8")
    assert f"time: predicted by run {made.folder.name} (8 ranks, 4 samples per rank and step)" in done.err


def test_a_file_over_its_budget_of_gpu_hours_is_refused(file: Path) -> None:
    over = (file, *_ON_4_GPUS, "slurm.max_gpu_hours=49")
    done = hpc_train("plan", *over, *_THROUGHPUT)
    assert done.code == 65 and "slurm.max_gpu_hours: 49 is less than the 50 GPU-hours that" in done.err
    assert hpc_train("plan", file, *_ON_4_GPUS, "slurm.max_gpu_hours=51", *_THROUGHPUT).code == 0

    # Nothing predicts it: one attempt uses at most 8 GPU-hours, those of two runs 16.
    assert hpc_train("plan", file, *_ON_4_GPUS, "slurm.max_gpu_hours=8").code == 0
    sweep = (file, *_ON_4_GPUS, "slurm.max_gpu_hours=15", "sweep.grid={seed: [1, 2]}")
    for command in (("plan",), ("submit", "--dry-run")):
        done = hpc_train(*command, *sweep)
        assert done.code == 65, command
        assert "15 is less than the 16 GPU-hours that one attempt of each run may use" in done.err
    assert not runs_root().exists()


def test_each_run_of_a_sweep_has_its_share_of_the_budget(file: Path) -> None:
    sweep = ("sweep.grid={seed: [1, 2, 3, 4]}", "slurm={max_gpu_hours: 10}")
    runs = make_plan(load(file, sweep)).runs
    shares = [run.experiment.slurm.max_gpu_hours for run in runs if run.experiment.slurm is not None]
    assert shares == [2.5] * 4


def test_the_budget_of_a_search_is_that_of_all_its_trials(file: Path) -> None:
    """Each trial takes 50 GPU-hours; a submit starts two of the ten."""
    ranges = "parameters: {optimization.optimizer.lr: {uniform: [0.01, 0.1]}}"
    search = f"sweep.search={{trials: 10, max_concurrent: 2, metric: loss, mode: min, {ranges}}}"
    for budget, is_refused in ((499, True), (501, False)):
        loaded = load(file, (*_ON_4_GPUS, search, f"slurm.max_gpu_hours={budget}"))
        trials = [{"optimization.optimizer.lr": lr} for lr in (0.02, 0.03)]
        plan = make_plan(loaded, lambda experiment: Ranks(4, 4, 4, gpus=4), trials=trials)
        lines = over_budget_lines(loaded, plan, "slurm", cost_of(plan, "slurm", 0.016))
        assert bool(lines) == is_refused
        assert not lines or "499 is less than the 500 GPU-hours" in lines[0]


def test_a_plan_with_a_run_over_its_share_is_refused(file: Path) -> None:
    loaded = load(file, (*_ON_4_GPUS, "sweep.grid={optimization.epochs: [2, 30]}", "slurm.max_gpu_hours=60"))
    plan = make_plan(loaded, lambda experiment: Ranks(4, 4, 4, gpus=4))
    (line,) = over_budget_lines(loaded, plan, "slurm", cost_of(plan, "slurm", 0.016))
    assert "is predicted to need 50 GPU-hours, and its share is 30" in line
