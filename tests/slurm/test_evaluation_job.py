"""``evaluate`` and ``predict`` in a job: their ranks are those of the node on which the job runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY, rows
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.runs import sbatch, wait_for_state

pytestmark = [pytest.mark.slow]


def test_a_job_evaluates_a_checkpoint_and_writes_predictions(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    run, row, predictions = quiet_runs.of(), tmp_path / "row.json", tmp_path / "predictions.jsonl"
    program = shlex.join([sys.executable, "-m", "hpc_train"])
    commands = [
        f"cd {REPOSITORY}",
        f"{program} evaluate {run.folder} --devices 2 --json > {row}",
        f"{program} predict {run.folder} --devices 2 -o {predictions}",
    ]
    job = sbatch(cluster, "--partition=low", "--cpus-per-task=2", wrap=" && ".join(commands), folder=tmp_path)
    ended = wait_for_state(cluster, job, "COMPLETED", "FAILED")
    assert ended == "COMPLETED", (tmp_path / f"{job}.out").read_text()
    found, expected = json.loads(row.read_text())["row"], rows(run, "val")[-1]
    assert {key: found[key] for key in ("step", "loss", "accuracy")} == {
        key: expected[key] for key in ("step", "loss", "accuracy")
    }
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert len(lines) == 359, "one per validation sample of digits"
