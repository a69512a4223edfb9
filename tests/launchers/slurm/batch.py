"""A run in the hands of a batch job, as ``begin`` and ``after`` find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.files import write_json
from tests.run.runs import small_run
from tests.waiting import HANG_LIMIT_S

ENVIRON = {
    "SLURM_ARRAY_JOB_ID": "12",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_ID": "13",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "HPC_TRAIN_HOSTS": "n1 n2",
}


def submitted_run(folder: Path, **changes: Any) -> tuple[RunPaths, Path]:
    """Return a run and the submission that has it as its first task."""
    paths = small_run(folder, **changes)
    submission = paths.siblings.submission("feed").folder
    submission.mkdir(parents=True, mode=0o700)
    write_json(submission / "submission.json", {"version": 1, "runs": [paths.folder.name], "job_id": "12"})
    return paths, submission


def as_command(
    module: str, environ: dict[str, str], submission: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of the batch script."""
    return subprocess.run(
        [sys.executable, "-m", f"hpc_train.launchers.slurm.{module}", str(submission), *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )


def restarted(times: int) -> dict[str, str]:
    return ENVIRON | {"SLURM_RESTART_COUNT": str(times)}
