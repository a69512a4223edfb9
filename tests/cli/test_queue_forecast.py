"""Which runs of a file the queue is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.cli import queue_forecast
from hpc_train.experiment.plan.planning import Plan
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import JobForecast, KeyProblem, StartRequest
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from tests.plan.files import loaded, plan_on_slurm


class _TwoJobs(SlurmLauncher):
    """A queue that takes two jobs of a user."""

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
        too_many = KeyProblem("sweep", f"{len(runs)} runs", "write less")
        return [JobForecast([run.paths for run in runs], problems=[too_many] if len(runs) > 2 else [])]


def _refused(file: Loaded, plan: Plan) -> list[str]:
    return queue_forecast.never_starting(_TwoJobs(), file, plan.name, queue_forecast.to_submit(plan))


def test_only_runs_that_would_be_submitted_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    file = loaded(tmp_path, "sweep.grid={seed: [1, 2, 3, 4]}", more="slurm: {}\n")
    plan = plan_on_slurm(file)
    assert len(_refused(file, plan)) == 1
    for run in plan.runs[:2]:
        paths = RunPaths(runs_root() / plan.name / run.id)
        paths.folder.mkdir(parents=True)
        paths.run.write_text("{}")
    assert _refused(file, plan) == []
    (line,) = queue_forecast.never_starting(_TwoJobs(), file, plan.name, plan.runs)
    assert "sweep: 4 runs" in line
