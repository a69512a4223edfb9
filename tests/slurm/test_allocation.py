"""Runs in a job that their user already has (``--here``): salloc, or a batch script that calls hpc-train."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from hpc_train.run.run_status import read_status
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    LIMIT_S,
    assert_equal_to_the_bit,
    found_runs,
    installed,
    only_run,
    start,
    wait_for,
    work_tree,
    write_experiment,
)
from tests.quiet import QuietRuns
from tests.slurm import runs
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    account,
    job_of,
    ranks_of,
    records,
    standby_files,
    standing,
    standing_of,
    succeed,
    wait_for_attempt_end,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.test_nodes import PACE_S, quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENDLESS = ("optimization.steps=5000", "checkpoint.every_steps=1000")


@dataclass(frozen=True)
class Shell:
    """A shell of salloc: its job's id, and variables as of a step with other tasks."""

    job: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": self.job,
            "SLURM_NTASKS": "7",
            "SLURM_NTASKS_PER_NODE": "7",
            "SLURM_TASKS_PER_NODE": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_CPUS_PER_TASK": "5",
        }


@pytest.fixture
def shell(cluster: Cluster) -> Iterator[Shell]:
    """Two nodes with two cores each, for half an hour."""
    size = ("--nodes=2", "--ntasks-per-node=2", "--time=30")
    cluster.run("salloc", "--no-shell", "--partition=low", "--job-name=mine", *size)
    yield Shell(cluster.run("squeue", "--noheader", "--name=mine", "--format=%A").strip())


def here(shell: Shell, folder: Path, *words: str | Path, pace_s: float = 0.0) -> subprocess.Popen[str]:
    own = {"HPC_TRAIN_RUNS": str(folder / "runs"), "PACED_TRAIN_S": str(pace_s)}
    return start(*words, "--here", **(ENVIRONMENT | own | shell.environment))


@pytest.mark.fault(16, 65)
def test_a_killed_rank_restarts_in_the_users_own_job(
    cluster: Cluster, shell: Shell, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """From ranks on standby."""
    with Hold(tmp_path, 12) as hold:
        overrides = ("checkpoint.every_steps=5", "recovery.standby=true", hold.override)
        process = here(shell, tmp_path, "submit", write_experiment(tmp_path, EXPERIMENT), *overrides)
        wait_for(lambda: bool(found_runs(tmp_path)) or process.poll() is not None, "a run", LIMIT_S)
        paths = only_run(tmp_path)
        wait_for_step(paths, 12)
        run = standing_of(paths)
        assert (run["state"], run["job"]) == ("running", shell.job)
        (victim,) = ranks_of(paths, rank=2, attempt=1)
        wait_for(lambda: len(standby_files(paths)) == 4, f"ranks on standby\n{account(paths)}", LIMIT_S)
        os.kill(victim, signal.SIGKILL)
        wait_for_attempt_end(paths, 1)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, f"{err}\n{account(paths)}"
    first, second = records(paths)
    assert (first.cause, second.cause, second.in_place) == ("crash", "completed", True), account(paths)
    for record in (first, second):
        assert (record.launcher, record.job, record.hosts) == ("allocation", shell.job, ["n1", "n2"])
        assert record.ranks == 4
    assert "crash 1 of 3: rank 2 on n2" in err
    assert "which was on standby" in paths.attempt(2).log(2).read_text()
    wait_for(lambda: not ranks_of(paths) and not standby_files(paths), "the end of all ranks", LIMIT_S)
    assert runs.state(cluster, shell.job) == "RUNNING"
    assert_equal_to_the_bit(quiet(quiet_runs), paths)


@pytest.mark.fault(65)
def test_cancel_and_ctrl_c_end_the_run_and_leave_the_users_job(
    cluster: Cluster, shell: Shell, tmp_path: Path
) -> None:
    process = here(shell, tmp_path, "submit", write_experiment(tmp_path, EXPERIMENT), *ENDLESS, pace_s=PACE_S)
    wait_for(lambda: bool(found_runs(tmp_path)) or process.poll() is not None, "a run", LIMIT_S)
    paths = only_run(tmp_path)
    wait_for_step(paths, 3)
    succeed(tmp_path, "cancel", paths.folder)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, read_status(paths).state) == (ExitCode.FAILED, "cancelled"), err
    assert (records(paths)[0].cause, runs.state(cluster, shell.job)) == ("cancelled", "RUNNING")
    saved = committed(paths)[0].step
    assert saved >= 3

    process = here(shell, tmp_path, "resume", paths.folder, "--nodes", "1", pace_s=PACE_S)
    wait_for(lambda: len(records(paths)) == 2 or process.poll() is not None, "attempt 2", LIMIT_S)
    wait_for_step(paths, saved + 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, read_status(paths).state) == (ExitCode.INTERRUPTED, "interrupted"), err
    record = records(paths)[1]
    assert (record.cause, record.ranks, record.hosts) == ("interrupted", 2, ["n1"]), account(paths)
    assert (record.reason or "").startswith("stopped by Ctrl-C; `hpc-train resume"), record.reason
    assert committed(paths)[0].step > saved
    assert runs.state(cluster, shell.job) == "RUNNING"
    assert not ranks_of(paths)


def test_the_runs_of_a_sweep_follow_each_other(cluster: Cluster, shell: Shell, tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, EXPERIMENT)
    process = here(shell, tmp_path, "submit", experiment, "slurm={nodes: 4, gpus_per_node: 1}")
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, found_runs(tmp_path)) == (ExitCode.BAD_FILE, [])
    assert f"slurm.nodes: 4 exceeds the 2 nodes of job {shell.job}; add --nodes 2" in err
    assert f"slurm.gpus_per_node: 1 exceeds the 0 GPUs per node of job {shell.job}" in err
    process = here(
        shell, tmp_path, "submit", experiment, "sweep={grid: {seed: [1, 2]}}", "checkpoint={every: auto}",
        "--nodes", "1",
    )  # fmt: skip
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (first,), (second,) = sorted(map(records, found_runs(tmp_path)), key=lambda one: one[0].start)
    assert {first.cause, second.cause} == {"completed"} and (first.end or "") <= second.start
    assert {first.job, second.job} == {shell.job} and first.hosts == second.hosts == ["n1"]
    assert first.save_interval["every_s"] == 600.0 and first.save_interval["saves"] == 1
    for run in standing(tmp_path):
        assert (run["state"], run["job"]) == ("completed", shell.job)
        assert run["save_interval"]["stall_s"] > 0


def test_runs_of_a_sweep_train_beside_each_other(
    cluster: Cluster, shell: Shell, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Five runs in two slots on each of two nodes; the fifth takes the slot of a run that is killed."""
    text, _, _ = EXPERIMENT.partition("slurm:")
    sweep = ("slurm={runs_per_job: 2}", "sweep={grid: {seed: [1, 2, 3, 4, 5]}}", "recovery.max_crashes=0")
    experiment = write_experiment(tmp_path, text)
    _, err = here(shell, tmp_path, "submit", experiment, *sweep).communicate(timeout=LIMIT_S)
    assert f"slurm.runs_per_job: this shell is step 0 of job {shell.job}, which holds cores" in err
    with Hold(tmp_path, 3) as hold:
        own = shell.environment | {"SLURM_STEP_ID": "4294967290", "HPC_TRAIN_RUNS": str(tmp_path / "runs")}
        process = start("submit", experiment, *sweep, hold.override, "--here", **(ENVIRONMENT | own))

        def begun() -> list[RunPaths]:
            return [paths for paths in found_runs(tmp_path) if records(paths)]

        wait_for(lambda: len(begun()) == 4 or process.poll() is not None, "four runs", LIMIT_S)
        first = begun()
        for paths in first:
            wait_for_step(paths, 3)
        assert sorted(records(paths)[0].hosts for paths in first) == [["n1"], ["n1"], ["n2"], ["n2"]]
        assert len(begun()) == 4, "the nodes have four slots"
        (victim,) = ranks_of(first[0])
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(begun()) == 5 or process.poll() is not None, "the fifth run", LIMIT_S)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == ExitCode.FAILED, err
    assert [read_status(paths).state for paths in first] == ["failed", *["completed"] * 3], err
    (last,) = [paths for paths in begun() if paths not in first]
    assert read_status(last).state == "completed" and records(last)[0].hosts == records(first[0])[0].hosts
    assert runs.state(cluster, shell.job) == "RUNNING"
    seed = json.loads(first[1].resolved.read_text())["seed"]
    alone = quiet_runs.of(f"seed={seed}", text=text, ranks=1, environment=ENVIRONMENT)
    assert_equal_to_the_bit(alone, first[1])


def script(folder: Path, *words: str | Path) -> str:
    """Return shell commands of a batch script of the user's own that calls hpc-train."""
    own = {
        "HPC_TRAIN_RUNS": str(folder / "runs"),
        "PACED_TRAIN_S": str(PACE_S),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(installed()), os.environ.get("PYTHONPATH")))),
    }
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in (ENVIRONMENT | own).items())
    python = shlex.join([sys.executable, "-m", "hpc_train", *map(str, words)])
    return f"cd {shlex.quote(str(work_tree()))}; export {exports}; {python}"


def run_of(cluster: Cluster, job: str, folder: Path) -> RunPaths:
    """Wait for the run that the job creates."""
    running = {"PENDING", "CONFIGURING", "RUNNING"}
    wait_for(lambda: bool(found_runs(folder)) or runs.state(cluster, job) not in running, "a run", LIMIT_S)
    assert found_runs(folder), (folder / f"{job}.out").read_text()
    return only_run(folder)


@pytest.mark.fault(65)
def test_the_end_of_the_users_job_leaves_a_run_that_resumes_in_the_queue(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to all processes of the job; ranks save, and nothing is requeued."""
    experiment = write_experiment(tmp_path, EXPERIMENT)
    wrap = script(tmp_path, "submit", experiment, *ENDLESS, "--here")
    job = runs.sbatch(cluster, "--nodes=2", "--ntasks-per-node=2", wrap=wrap, folder=tmp_path)
    paths = run_of(cluster, job, tmp_path)
    wait_for_step(paths, 3)
    cluster.run("scancel", "--full", job)
    wait_for_state(paths, "interrupted")
    record = wait_for_attempt_end(paths, 1)
    assert (record.cause, record.job) == ("interrupted", job), account(paths)
    assert committed(paths)[0].step >= 3, account(paths)
    runs.wait_for_state(cluster, job, "CANCELLED")
    saved = committed(paths)[0].step
    succeed(tmp_path, "resume", paths.folder)
    assert job_of(paths) != job
    wait_for_step(paths, saved + 1)
    assert records(paths)[1].launcher == "slurm"


@pytest.mark.fault(65)
def test_the_time_limit_of_the_users_job_reaches_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """The command signals the ranks before Slurm ends the job, as Slurm does for a job of submit."""
    experiment = write_experiment(tmp_path, EXPERIMENT)
    wrap = script(tmp_path, "submit", experiment, *ENDLESS, "slurm.signal_lead_s=20", "--here")
    job = runs.sbatch(cluster, "--nodes=2", "--ntasks-per-node=2", "--time=1", wrap=wrap, folder=tmp_path)
    paths = run_of(cluster, job, tmp_path)
    wait_for_state(paths, "interrupted")
    record = wait_for_attempt_end(paths, 1)
    assert record.cause == "time limit", account(paths)
    # On a busy machine it may come before the first step.
    saved = max((checkpoint.step for checkpoint in committed(paths)), default=0)
    assert (record.reason or "").startswith(f"time limit at step {saved}; "), account(paths)
    assert ("first_step" in record.events) == (saved > 0), account(paths)
    runs.wait_for_state(cluster, job, "FAILED")  # the command's exit code, well before the limit


def test_a_job_that_submits_another_passes_nothing_of_itself_on(cluster: Cluster, tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, EXPERIMENT)
    misleading = "export SBATCH_EXCLUSIVE=1 SRUN_CPUS_PER_TASK=3 SLURM_CPUS_PER_TASK=3"
    wrap = f"{misleading}; {script(tmp_path, 'submit', experiment)}"
    job = runs.sbatch(cluster, "--nodes=1", "--ntasks=3", wrap=wrap, folder=tmp_path)
    paths = run_of(cluster, job, tmp_path)
    wait_for_state(paths, "completed")
    (record,) = records(paths)
    assert (record.ranks, len(record.hosts), record.launcher) == (4, 2, "slurm"), account(paths)
    assert job_of(paths) != job
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job_of(paths))
    assert "CPUs/Task=1" in shown and "OverSubscribe=OK" in shown, shown
