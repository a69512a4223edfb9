"""A run with ``checkpoint.best`` and ``early_stopping``, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode
from hpc_train.run.checkpoints import committed, kept_best
from tests.end_to_end.runs import (
    OWN_TASK,
    assert_equal_to_the_bit,
    hpc_train,
    only_run,
    rows,
    status,
    write_experiment,
)
from tests.end_to_end.test_resume import submit_with_kills
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: The highest loss is that of the first evaluation, whose checkpoint ``keep`` alone would not keep.
SELECTION = (
    "evaluation.every_steps=4",
    "checkpoint={every_steps: 6, keep: 2, best: {metric: loss, mode: max}}",
    "early_stopping={metric: loss, mode: min, patience: 2, min_delta: 0.3}",
)


def test_a_killed_run_has_the_same_best_and_stops_at_the_same_step(
    quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """``min_delta`` decides where: no evaluation but the first lowers the loss by that much."""
    quiet = quiet_runs.of(*SELECTION)
    ended = status(quiet)
    assert ended["state"] == "completed" and 4 < ended["step"] < 30
    assert ended["reason"].startswith("stopped early: no better loss in 2 evaluations (loss ")
    between = ended["step"] - 3  # two evaluations
    killed = submit_with_kills(tmp_path / "killed", [between], *SELECTION)
    assert_equal_to_the_bit(quiet, killed)
    assert {**ended, "attempt": 2} == status(killed)
    best = kept_best(quiet)
    assert best is not None and best == kept_best(killed)
    expected = max(rows(quiet, "val"), key=lambda row: (row["loss"], -row["step"]))
    assert (best.step, best.value) == (expected["step"], expected["loss"])
    for run in (quiet, killed):
        assert run.checkpoint_folders()[0].step == best.step
        assert len(run.checkpoint_folders()) == 3, "two are kept, and the best"
    assert killed.checkpoint(best.step).folder.is_dir()
    done = hpc_train("export", killed.folder, "--best", "-o", tmp_path / "best.safetensors")
    assert done.code == 0, done.err
    assert json.loads(done.out)["step"] == best.step


def test_a_metric_that_a_task_of_the_users_does_not_have_costs_no_training(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path)
    wrong = (
        "checkpoint.best={metric: acc, mode: max}",
        "checkpoint.every_steps=21",
        "evaluation.every_steps=5",
    )
    start = ("submit", experiment, *OWN_TASK, *wrong, "optimization.steps=21", "--local", "--devices", "2")
    done = hpc_train(*start, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    assert done.code == ExitCode.BAD_FILE
    assert "acc is not a metric of this run's evaluations; write one of accuracy" in done.err
    run = only_run(tmp_path)
    assert [each.step for each in committed(run)] == [5]
    done = hpc_train("resume", run.folder, "checkpoint.best.metric=accuracy")
    assert done.code == 0, done.err
    assert status(run)["state"] == "completed" and kept_best(run) is not None
