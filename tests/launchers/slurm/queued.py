"""Run folders as a submission and a job's begin leave them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.launchers.slurm.queue import JobState
from hpc_train.paths import RunPaths
from hpc_train.run import attempts
from hpc_train.run.attempts import claim_attempt, read_record, write_record
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, write_status
from tests.run.runs import small_experiment

#: The batch script's process as the login node sees it: on another machine.
_ELSEWHERE = Process("n1", "another boot", "pid:[1]", 1, 1)


def queued_run(folder: Path, job: str | None, run_id: str = "abc", name: str = "small") -> RunPaths:
    """Create a run whose job is queued; None: the submission was cut short before that."""
    paths = RunPaths(folder / name / run_id)
    assert create_run(paths, small_experiment(name=name), run_id, 10, launcher="slurm")
    if job is not None:
        add_job(paths, job)
    return paths


def add_job(paths: RunPaths, job: str, cluster: str | None = None) -> None:
    facts = read_json(paths.run)
    assert facts is not None
    write_json(paths.run, attempts.add_job(facts, job, cluster))


def begin(paths: RunPaths, job: str, restart: int = 0, *, step: int = 0, **facts: Any) -> int:
    """Claim an attempt as the batch script does; the run is ``running`` then."""
    number = claim_attempt(paths, "slurm", job=job, restart=restart)
    record = read_record(paths.attempt(number))
    assert record is not None
    write_record(paths.attempt(number), replace(record, launcher_process=_ELSEWHERE, **facts))
    write_status(paths, RunStatus("running", step, 10, attempt=number))
    return number


def job(job_id: str, state: str, reason: str | None = None, restarts: int = 0, **facts: Any) -> JobState:
    return JobState(job_id, state, reason, restarts, **facts)
