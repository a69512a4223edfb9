"""Runs of a sweep that share a job, each in a slot of its own, on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from hpc_train.run.run_status import read_status
from tests.disks import on_small_disk, take_room
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import assert_equal_to_the_bit, found_runs, hpc_train, wait_for
from tests.launchers.slurm.programs import Programs
from tests.quiet import QuietRuns
from tests.slurm import runs as slurm_jobs
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    account,
    job_of,
    ranks_of,
    records,
    standing_of,
    start_now,
    submit,
    succeed,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.runs import high_job
from tests.workloads.programs import write_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ALONE, _, _ = EXPERIMENT.partition("slurm:")
SHARED = (
    ALONE
    + """\
slurm: {partition: low, ranks_per_node: 1, time_limit: 30min, runs_per_job: 2}
sweep: {grid: {seed: [1, 2, 3, 4]}, max_parallel: 2}
"""
)
#: Writes the devices and cores that the rank has received, and waits for the file ``go``, or fails.
_WAITING = """\
import json, os, pathlib, sys, time
names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "SLURM_CPUS_ON_NODE", "SLURM_NTASKS")
pathlib.Path("received.json").write_text(json.dumps({name: os.environ.get(name) for name in names}))
place = pathlib.Path(sys.argv[1])
while not (place / "go").exists():
    time.sleep(0.1)
sys.exit(0)
"""
_PROGRAM = """\
name: prog
program: {{command: [python, train.py, {place}]}}
slurm: {{partition: low, time_limit: 30min, runs_per_job: 2, gpus_per_node: 1, cpus_per_gpu: 2, mem_gb: 3}}
sweep: {{grid: {{seed: [1, 2, 3, 4]}}, max_parallel: 2}}
"""


def by_seed(folder: Path) -> list[RunPaths]:
    return sorted(found_runs(folder), key=lambda run: int(json.loads(run.resolved.read_text())["seed"]))


def reference(quiet_runs: QuietRuns, seed: int) -> RunPaths:
    """Return the run of this seed that trained alone, undisturbed."""
    return quiet_runs.of(f"seed={seed}", text=ALONE, ranks=1, environment=ENVIRONMENT)


@pytest.mark.fault(1, 14, 64)
def test_a_killed_rank_and_a_preemption_change_no_bit_of_the_runs_of_a_job(
    cluster: Cluster, tmp_path: Path, quiet_runs: QuietRuns
) -> None:
    with Hold(tmp_path, 2) as hold:
        submit(tmp_path, hold.override, text=SHARED)
        first, second, third, fourth = by_seed(tmp_path)
        (job,) = {job_of(run) for run in (first, second, third, fourth)}
        for run in (first, second):
            wait_for_step(run, 2)
        assert not third.attempt_folders() and not fourth.attempt_folders(), "the job has two slots"
        (rank,) = ranks_of(first)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: "first_step" in records(first)[-1].events and len(records(first)) == 2, "", LIMIT_S)
        assert records(first)[0].cause == "crash" and records(first)[1].in_place, account(first)
        assert len(records(second)) == 1 and records(second)[0].end is None, "the neighbor continues"
        with high_job(cluster, records(first)[-1].hosts):
            for run in (first, second):
                ended = wait_for_attempt_end(run, len(run.attempt_folders()))
                assert ended.cause == "preemption", account(run)
            assert slurm_jobs.wait_for_state(cluster, job, "PENDING") == "PENDING"
    start_now(cluster, first)
    wait_for_completion(first, second, third, fourth)
    for seed, run in enumerate((first, second, third, fourth), start=1):
        assert_equal_to_the_bit(reference(quiet_runs, seed), run)
    assert [record.cause for record in records(second)] == ["preemption", "completed"], account(second)
    assert [len(records(run)) for run in (third, fourth)] == [1, 1], account(third)
    assert slurm_jobs.wait_for_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", account(first)
    assert slurm_jobs.field(cluster, job, "Restarts") == "1"


@pytest.mark.fault(67)
def test_a_full_disk_of_one_run_ends_that_run_alone(
    cluster: Cluster, tmp_path: Path, quiet_runs: QuietRuns
) -> None:
    with Hold(tmp_path, 7) as hold:
        # Held until its folder is on a disk of its own; slot and files of the others are as always.
        submit(tmp_path, hold.override, "slurm.extra={hold: true}", "checkpoint.every_steps=5", text=SHARED)
        first, second, *others = by_seed(tmp_path)
        with on_small_disk(first.folder, "24m"):
            job = job_of(first)
            cluster.run("scontrol", "release", job)
            for run in (first, second):
                wait_for_step(run, 7)
            wait_for(lambda: bool(committed(first)), f"a checkpoint\n{account(first)}", LIMIT_S)
            ballast = first.folder / "ballast"
            wait_for(lambda: take_room(ballast, leave_bytes=500_000), "a full disk", LIMIT_S)
            hold.release()
            assert wait_for_state(first, "failed", "completed") == "failed", account(first)
            state, reason = read_status(first).state, read_status(first).reason or ""
            assert "the disk is full" in reason and str(first.checkpoints) in reason, (state, reason)
            wait_for_completion(second, *others)
            assert slurm_jobs.wait_for_state(cluster, job, "COMPLETED", "FAILED") == "FAILED"
            assert [len(records(run)) for run in (first, second, *others)] == [1, 1, 1, 1], account(first)
            ballast.unlink()
            succeed(tmp_path, "resume", first.folder)
            cluster.run("scontrol", "release", job_of(first))
            wait_for_completion(first)
            for seed, run in enumerate((first, second, *others), start=1):
                assert_equal_to_the_bit(reference(quiet_runs, seed), run)


def submit_programs(folder: Path, text: str, num_begun: int, **environment: str) -> list[RunPaths]:
    """Submit runs that end once the file ``go`` exists; return them once the first ones have begun."""
    (folder / "train.py").write_text(_WAITING)
    file = write_program(folder, text.format(place=folder), folder / "train.py")
    environment = ENVIRONMENT | {"HPC_TRAIN_RUNS": str(folder / "runs")} | environment
    done = hpc_train("submit", file, cwd=file.parent, **environment)
    assert done.code == 0, done.err
    runs = by_seed(folder)
    for run in runs[:num_begun]:
        wait_for((run.work / "received.json").exists, account(run), LIMIT_S)
    return runs


def received_by(runs: Sequence[RunPaths]) -> list[dict[str, str]]:
    return [json.loads((run.work / "received.json").read_text()) for run in runs]


@pytest.fixture
def programs(cluster: Cluster, tmp_path: Path) -> list[RunPaths]:
    """Four runs in a job of two slots, of which two have begun."""
    return submit_programs(tmp_path, _PROGRAM, 2)


def status(run: RunPaths) -> str:
    shown = standing_of(run)
    return f"{shown['state']}: {shown['reason']}"


@pytest.mark.fault(46, 64)
def test_a_cancelled_run_leaves_the_job_to_the_others(
    cluster: Cluster, programs: list[RunPaths], tmp_path: Path
) -> None:
    job = job_of(programs[0])
    assert status(programs[3]) == f"pending: waits for a slot of job {job}"
    succeed(tmp_path, "cancel", programs[0].folder, programs[3].folder)
    assert [status(run).partition(":")[0] for run in programs[::3]] == ["cancelled", "cancelled"]
    wait_for((programs[2].work / "received.json").exists, account(programs[2]), LIMIT_S)  # the slot is free
    succeed(tmp_path, "resume", programs[0].folder)
    assert job_of(programs[0]) != job
    (tmp_path / "go").touch()
    wait_for_completion(*programs[:3])
    assert [len(records(run)) for run in programs] == [2, 1, 1, 0]
    assert slurm_jobs.wait_for_state(cluster, job, "COMPLETED", "FAILED") == "FAILED", "a run was cancelled"


def test_each_slot_has_its_share_of_the_job(
    cluster: Cluster, programs: list[RunPaths], tmp_path: Path
) -> None:
    received = received_by(programs[:2])
    assert {entry["CUDA_VISIBLE_DEVICES"] for entry in received} == {"0", "1"}
    assert [entry["SLURM_CPUS_ON_NODE"] for entry in received] == ["2", "2"]
    assert [entry["SLURM_NTASKS"] for entry in received] == ["1", "1"]
    job = job_of(programs[0])
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
    assert "cpu=4,mem=6G" in shown and re.search("gres[:/]gpu[:=]2", shown), shown
    succeed(tmp_path, "cancel", *(run.folder for run in programs))
    assert slurm_jobs.wait_for_state(cluster, job, "CANCELLED", "FAILED") == "CANCELLED"


#: Stand-ins for programs of NVIDIA, which write down how they were called.
_NVIDIA = {
    "nvidia-smi": 'case $* in *--id=0,1) printf "GPU-a\\nGPU-b\\n" ;; *) exit 1 ;; esac',
    "nvidia-cuda-mps-control": '[ "${1-}" ] || echo "< $(cat)" >> "$0.calls"; cd "$CUDA_MPS_PIPE_DIRECTORY"',
}


def test_runs_share_gpus_by_mps(cluster: Cluster, tmp_path: Path) -> None:
    programs = Programs(tmp_path / "bin")
    for name, script in _NVIDIA.items():
        programs.put(name, script)
    text = _PROGRAM.replace("runs_per_job: 2", "runs_per_job: 4, runs_per_gpu: 2")
    text = text.replace("max_parallel: 2", "max_parallel: 4")
    runs = submit_programs(tmp_path, text, 4, PATH=f"{programs.folder}:{os.environ['PATH']}")
    received = received_by(runs)
    assert sorted(entry["CUDA_VISIBLE_DEVICES"] for entry in received) == ["GPU-a", "GPU-a", "GPU-b", "GPU-b"]
    assert {entry["SLURM_CPUS_ON_NODE"] for entry in received} == {"2"}
    (pipe,) = {entry["CUDA_MPS_PIPE_DIRECTORY"] for entry in received}
    assert Path(pipe).is_dir() and programs.calls("nvidia-cuda-mps-control") == ["-d"]
    job = job_of(runs[0])
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
    assert "cpu=8,mem=12G" in shown and re.search("gres[:/]gpu[:=]2", shown), shown
    steps = cluster.run("scontrol", "--oneliner", "show", "step", job)
    assert re.findall(r" CPUs=([1-9]\d*) ", steps) == ["8"] * 4, "the slots choose from all cores of the job"
    # A cancelled run is a step of its own, although all steps have all of the job.
    succeed(tmp_path, "cancel", runs[0].folder)
    assert [status(run).partition(":")[0] for run in runs] == ["cancelled", *["running"] * 3]
    (tmp_path / "go").touch()
    wait_for_completion(*runs[1:])
    assert slurm_jobs.wait_for_state(cluster, job, "COMPLETED", "FAILED") == "FAILED", "a run was cancelled"
    assert programs.calls("nvidia-cuda-mps-control") == ["-d", "", "< quit"]
    assert not Path(pipe).exists()
