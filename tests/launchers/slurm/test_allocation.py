"""Runs in a job that their user already has: what the job has, and how attempts in it end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UsageError
from hpc_train.experiment.config.schema import SlurmConfig
from hpc_train.launchers.lookup import launcher_of, next_launcher
from hpc_train.launchers.slurm.after import after
from hpc_train.launchers.slurm.allocation import AllocationLauncher
from hpc_train.launchers.slurm.batch_job import IN_ALLOCATION, JOB, BatchJob
from hpc_train.launchers.slurm.begin import begin
from hpc_train.launchers.slurm.cluster_facts import AllocatedNode, Allocation
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import EventLog, now_ms, write_record
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.launchers.slurm.batch import ENVIRON, submitted_run
from tests.launchers.slurm.programs import put_programs_first
from tests.run.runs import record_of

#: As Slurm 22.05 and 24.11 print jobs, shortened.
SHOWN = (
    "JobId=12 JobName=interactive JobState=RUNNING Reason=None EndTime=2026-11-28T10:00:00 NodeList=n[1-3] "
    "NumNodes=3 TRES=cpu=10 JOB_GRES=gpu:a100:4    Nodes=n[1-2] CPU_IDs=0-1,4 Mem=4096 "
    "GRES=gpu:a100:2(IDX:0-1)    Nodes=n3 CPU_IDs=0-3 Mem=8192 GRES=gpu:1(IDX:0)  MinCPUsNode=1"
)
HERE = ENVIRON | {IN_ALLOCATION: "1"}


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Allocation:
    names = 'case $3 in "n[1-2]") echo n1; echo n2 ;; *) echo "$3" ;; esac'
    put_programs_first(tmp_path, monkeypatch).put("scontrol", names)
    return Allocation.of("12", SHOWN)


def test_an_allocation_has_the_jobs_part_of_each_node(allocation: Allocation) -> None:
    first = AllocatedNode("n1", 3, 4096, 2)
    assert allocation.nodes == (first, replace(first, name="n2"), AllocatedNode("n3", 4, 8192, 1))
    assert allocation.end_s == datetime(2026, 11, 28, 10, tzinfo=UTC).timestamp()
    assert (allocation.least.cpus, allocation.least.mem_mb, allocation.least.gpus) == (3, 4096, 1)


@pytest.mark.parametrize(
    ("environ", "shown", "message"),
    [
        ({}, "", "--here: this shell is in no Slurm job"),
        ({"SLURM_JOB_ID": "12"}, "JobId=12 JobState=COMPLETING", "job 12 .* is COMPLETING"),
        ({"SLURM_JOB_ID": "12"}, "JobId=12 JobState=RUNNING", "names no nodes"),
    ],
)
def test_without_a_running_job_there_is_a_clear_error(
    environ: dict[str, str], shown: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_programs_first(tmp_path, monkeypatch).put("scontrol", f"echo '{shown}'")
    with pytest.raises(UsageError, match=message):
        Allocation.read(environ)


@pytest.mark.parametrize(
    ("section", "count", "key", "message"),
    [
        ({}, None, None, ""),
        ({"nodes": 3, "gpus_per_node": 1, "cpus_per_gpu": 3, "mem_gb": 4}, None, None, ""),
        ({"nodes": 4}, None, "slurm.nodes", "4 exceeds the 3 nodes of job 12"),
        ({"nodes": "4-8"}, None, "slurm.nodes", "4-8 exceeds the 3 nodes of job 12"),
        ({"nodes": 4}, 2, None, ""),
        ({"gpus_per_node": 2}, None, "slurm.gpus_per_node", "2 exceeds the 1 GPU per node of job 12"),
        ({"ranks_per_node": 4}, None, "slurm.ranks_per_node", "4 ranks per node need 4 cores, job 12 has 3"),
        ({"cpus_per_gpu": 4}, None, "slurm.cpus_per_gpu", "1 rank per node need 4 cores, job 12 has 3"),
        ({"mem_gb": 5}, None, "slurm.mem_gb", "5 exceeds the 4.0 GB per node of job 12"),
    ],
)
def test_keys_that_exceed_the_allocation_are_named(
    allocation: Allocation, section: dict[str, Any], count: int | None, key: str | None, message: str
) -> None:
    problems = allocation.excesses(SlurmConfig(**section), count)
    assert [(problem.key, problem.message) for problem in problems] == ([(key, message)] if key else [])


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunPaths, Path]:
    """A run whose attempt 1 has begun in the user's job, which is a task of the user's own array."""
    paths, submission = submitted_run(tmp_path)
    facts = read_json(paths.run) or {}
    write_json(paths.run, facts | {"launcher": "allocation", "slurm_job_ids": ["12_7"]})
    assert begin(submission, HERE | {"SLURM_ARRAY_TASK_ID": "7"}) is not None
    return paths, submission


def shown(
    *, left_s: float = 3000.0, limit: str = "01:00:00", lasted_s: float = 3600.0, more: str = ""
) -> str:
    end = datetime.now() + timedelta(seconds=left_s)  # local, as Slurm prints it
    start = end - timedelta(seconds=lasted_s)
    times = f"StartTime={start:%FT%T} EndTime={end:%FT%T} {more}SuspendTime=None "
    return f"JobId=12 JobState=RUNNING Restarts=0 TimeLimit={limit} {times}"


@pytest.mark.parametrize(
    ("signalled", "request_", "job", "cause", "reason"),
    [
        ("SIGINT", "SIGINT", {}, "interrupted", "stopped by Ctrl-C"),
        (None, "SIGKILL", {}, "interrupted", "stopped by Ctrl-C"),
        ("SIGUSR2", "SIGUSR2", {"left_s": 100}, "time limit", "time limit at step 7"),
        ("SIGTERM", None, {"left_s": 10}, "time limit", "time limit at step 7"),
        ("SIGTERM", None, {"left_s": 0, "lasted_s": 600}, "interrupted", "stopped by SIGTERM"),
        ("SIGTERM", None, {"more": "PreemptTime=2026-11-28T10:00:00 "}, "preemption", "preempted at step 7"),
        ("SIGTERM", None, None, "interrupted", "stopped by SIGTERM"),
    ],
)
def test_a_stop_ends_the_run_as_interrupted(
    run: tuple[RunPaths, Path],
    signalled: str | None,
    request_: str | None,
    job: Mapping[str, Any] | None,
    cause: str,
    reason: str,
) -> None:
    paths, submission = run
    write_status(paths, RunStatus("running", step=7, attempt=1))
    events = EventLog(paths.attempt(1))
    events.note("first_step")
    if signalled:
        events.signalled(signalled, now_ms())
    if request_:
        (submission / "stop-request").write_text(f"{request_}\n")
    environ = HERE | {
        "SLURM_ARRAY_TASK_ID": "7",
        "HPC_TRAIN_ATTEMPT": "1",
        JOB: "" if job is None else shown(**job),
    }
    assert after(submission, 75 if signalled else 137, environ) == "stop 75"
    status = read_status(paths)
    resume = f"; `hpc-train resume {paths.folder.name} --here` continues it"
    assert status.state == "interrupted" and (status.reason or "").startswith(reason + resume)
    record = record_of(paths.attempt(1))
    assert (record.cause, record.job, record.launcher) == (cause, "12_7", "allocation")
    assert "requeue" not in record.events


def test_crashes_restart_in_place_and_then_end_the_run(run: tuple[RunPaths, Path]) -> None:
    """The second failure in a row without a checkpoint would be requeued in a job of submit."""
    paths, submission = run
    environ = HERE | {"SLURM_ARRAY_TASK_ID": "7", JOB: shown()}
    for number, verdict in ((1, "again"), (2, "stop 75")):
        paths.attempt(number).error(0).write_text("ValueError: too hot\n")
        paths.attempt(number).exit(0).write_text("1\n")
        assert after(submission, 1, environ | {"HPC_TRAIN_ATTEMPT": str(number)}) == verdict
        if verdict == "again":
            assert begin(submission, environ | {"HPC_TRAIN_IN_PLACE": "1"}) is not None
    status = read_status(paths)
    assert status.state == "interrupted" and (status.reason or "").startswith(
        "crash 2 of 3: rank 0: ValueError"
    )
    # A resume in the same job starts with a full budget: its batch script is another process.
    newest = record_of(paths.attempt(2))
    write_record(paths.attempt(2), replace(newest, launcher_process=Process.of(1)))
    assert len(BatchJob.of(submission, environ).earlier(2)) == 0


def test_a_resume_without_here_queues_the_run(run: tuple[RunPaths, Path]) -> None:
    paths, _ = run
    assert isinstance(launcher_of(paths), AllocationLauncher)
    assert next_launcher(paths) == "slurm"


@pytest.mark.parametrize(
    ("is_here", "job", "state", "reason"),
    [
        (True, "RUNNING", "failed", "launcher died"),
        (True, "TIMEOUT", "interrupted", "job 12_7, in which it ran, has ended (TIMEOUT)"),
        (False, "TIMEOUT", "interrupted", "job 12_7, in which it ran, has ended (TIMEOUT)"),
        (False, "RUNNING", "running", None),
    ],
)
def test_an_attempt_whose_end_nobody_wrote_ends_with_its_process_or_its_job(
    run: tuple[RunPaths, Path], is_here: bool, job: str, state: str, reason: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    paths, _ = run
    separator = "\x1f"
    line = separator.join(["12_7", job, "None", "0", "N/A", "N/A", "0", "n1", "mine", "/x", ""])
    put_programs_first(tmp_path, monkeypatch).put("squeue", f"printf '%s\\n' '{line}'")
    dead = Process.current()
    dead = replace(dead, start_ticks=1) if is_here else replace(dead, host="n1", boot_id="another")
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), launcher_process=dead))
    write_status(paths, RunStatus("running", step=7, attempt=1))
    for path in (paths.status, *paths.attempt(1).folder.iterdir()):
        os.utime(path, (time.time() - 60, time.time() - 60))
    (status,) = AllocationLauncher().status([paths])
    assert (status.state, status.reason) == (state, reason)
    assert (record_of(paths.attempt(1)).end is None) == (state == "running")
