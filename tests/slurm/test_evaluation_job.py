"""Evaluations in jobs: of ``evaluate`` and ``predict``, and those that training leaves to jobs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_train.launchers.slurm import evaluations
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.checkpoints import committed
from hpc_train.run.run_status import read_status
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import REPOSITORY, final_tensors, rows, wait_for
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    account,
    see_it_preempted,
    submit_one,
    succeed,
    wait_for_completion,
)
from tests.slurm.runs import field, high_job, sbatch, squeue, state, wait_for_state
from tests.slurm.test_spare_nodes import wait_until_held

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Evaluated at steps 20, 40 and 60.
ONE_NODE = EXPERIMENT.replace("nodes: 2, ranks_per_node: 2", "nodes: 1, ranks_per_node: 2")
BY_JOB = ("evaluation.as_job=true", "checkpoint.every_steps=5", "checkpoint.keep=2")
STEPS = [20, 40, 60]


def jobs_of(paths: RunPaths) -> dict[int, list[str]]:
    return {step: evaluation_jobs.job_ids(paths, step) for step in STEPS}


def wait_for_rows(paths: RunPaths, *steps: int) -> None:
    """Wait until these evaluations have ended."""

    def have_ended() -> bool:
        assert not evaluation_jobs.failures(paths), account(paths)
        return set(steps) <= evaluation_jobs.rows(paths).keys()

    wait_for(have_ended, f"evaluations of {steps}\n{account(paths)}", LIMIT_S)


def assert_evaluated(paths: RunPaths, expected: RunPaths) -> None:
    """Compare a run whose evaluations were jobs with one that was evaluated in training."""
    wait_for_completion(paths)
    wait_for_rows(paths, *STEPS)
    wait_for(lambda: len(rows(paths, "val")) == len(STEPS), f"the rows\n{account(paths)}", LIMIT_S)
    assert rows(paths) == rows(expected)
    best = evaluation_jobs.with_best(paths, read_status(paths)).best
    assert best == read_status(expected).best is not None
    ours, theirs = final_tensors(paths), final_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        is_equal = value == theirs[name]
        assert is_equal if isinstance(is_equal, bool) else is_equal.all(), name


@pytest.mark.fault(66)
def test_a_job_evaluates_each_checkpoint_once_while_the_run_is_preempted(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    with Hold(tmp_path, 30) as hold:
        paths = submit_one(tmp_path, *BY_JOB, hold.override, text=ONE_NODE)
        wait_until_held(hold, paths)
        wait_for_rows(paths, 20)
        hold.at(47, since_attempt=2)
        see_it_preempted(cluster, paths)
        wait_until_held(hold, paths)
        assert [row["step"] for row in rows(paths, "val")][:1] == [20], "joined while it trains"
    assert_evaluated(paths, quiet_runs.of(text=ONE_NODE, environment=ENVIRONMENT))
    for step, ids in jobs_of(paths).items():
        (job,) = ids
        assert wait_for_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", step
        assert (field(cluster, job, "NumTasks"), field(cluster, job, "TimeLimit")) == ("1", "00:30:00")
    names = cluster.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert [names.count(evaluations.job_name(paths, step)) for step in STEPS] == [1, 1, 1]


@pytest.mark.fault(66)
def test_a_checkpoint_is_kept_for_its_evaluation_whose_job_is_cancelled_with_the_run(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """``resume`` submits it again."""
    alone = "slurm.extra={exclusive: true}"  # evaluations then wait for another node
    with Hold(tmp_path, 52) as hold, high_job(cluster, ["n2", "n3", "n4"]) as others:
        wait_for_state(cluster, others, "RUNNING")
        paths = submit_one(tmp_path, *BY_JOB, alone, hold.override, text=ONE_NODE)
        wait_until_held(hold, paths)
        wait_for(lambda: evaluation_jobs.submitted(paths) == [20, 40], account(paths), LIMIT_S)
        wait_for(lambda: [saved.step for saved in committed(paths)] == [50, 45, 40, 20], "step 50", LIMIT_S)
        waiting = [job for ids in jobs_of(paths).values() for job in ids]
        assert {squeue(cluster)[job].state for job in waiting} == {"PENDING"}
        cancelled = succeed(tmp_path, "cancel", paths.folder)
        assert "cancelled the jobs of 2 evaluations" in cancelled.err
        assert {state(cluster, job) for job in waiting} == {"CANCELLED"}
        assert evaluation_jobs.submitted(paths) == []
    succeed(tmp_path, "resume", paths.folder)
    assert_evaluated(paths, quiet_runs.of(text=ONE_NODE, environment=ENVIRONMENT))
    assert not set(waiting) & {job for ids in jobs_of(paths).values() for job in ids}


def ranks_that_evaluate(paths: RunPaths) -> list[int]:
    """Return the processes that import this run's code; runs of other tests may have the same id."""
    found = []
    runs = os.fsencode(paths.folder.parents[1])
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            own = [entry for entry in variables if entry.startswith(b"HPC_TRAIN_RUN_FOLDER=")]
            is_rank = b"hpc_train.launchers.entry" in (folder / "cmdline").read_bytes()
            is_ours = any(entry.startswith(b"PYTHONPATH=") and runs in entry for entry in variables)
            if is_rank and is_ours and any(b"hpc-train-evaluate-" in entry for entry in own):
                found += [int(folder.name)] if own[0].endswith(paths.folder.name.encode()) else []
    return found


@pytest.mark.fault(66)
def test_an_evaluation_that_is_killed_or_requeued_is_repeated(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACED_EVAL_S", "0.3")  # of each of 15 micro-batches
    with Hold(tmp_path, 30) as hold:
        paths = submit_one(tmp_path, *BY_JOB, hold.override, text=ONE_NODE)
        wait_for(lambda: bool(ranks_that_evaluate(paths)), f"an evaluation\n{account(paths)}", LIMIT_S)
        for rank in ranks_that_evaluate(paths):
            os.kill(rank, signal.SIGKILL)
        wait_for_rows(paths, 20)
        wait_for(lambda: not ranks_that_evaluate(paths), "the end of the rank that wrote the row", LIMIT_S)
        hold.at(50)
        wait_for(lambda: bool(ranks_that_evaluate(paths)), f"an evaluation\n{account(paths)}", LIMIT_S)
        (job,) = jobs_of(paths)[40]
        cluster.run("scontrol", "requeue", job)
        wait_for(lambda: squeue(cluster)[job].state == "PENDING", job, LIMIT_S)
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        wait_for_rows(paths, 40)
    assert_evaluated(paths, quiet_runs.of(text=ONE_NODE, environment=ENVIRONMENT))
    assert field(cluster, job, "Restarts") == "1"
    assert [len(ids) for ids in jobs_of(paths).values()] == [1, 1, 1]


@pytest.mark.fault(66)
def test_evaluations_whose_jobs_are_lost_after_training_are_shown_and_repeated_by_hand(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    with high_job(cluster, ["n2", "n3", "n4"]) as others, Hold(tmp_path, 52) as hold:
        wait_for_state(cluster, others, "RUNNING")
        alone = "slurm.extra={exclusive: true}"  # evaluations wait for the end of the run
        paths = submit_one(tmp_path, *BY_JOB, alone, hold.override, text=ONE_NODE)
        wait_until_held(hold, paths)
        wait_for(lambda: evaluation_jobs.submitted(paths) == [20, 40], account(paths), LIMIT_S)
        (cancelled,), (killed,) = jobs_of(paths)[20], jobs_of(paths)[40]
        cluster.run("scontrol", "hold", cancelled)
        hold.release()
        wait_for_completion(paths)
        wait_for_state(cluster, killed, "RUNNING")
        cluster.run("scancel", "--full", "--signal=KILL", killed)
        cluster.run("scancel", cancelled)
    wait_for_rows_or_failures(paths)
    shown = succeed(tmp_path, "status", paths.folder).out
    for step, job in ((20, cancelled), (40, killed)):
        assert f"step {step} failed: job {job} ended without a result: CANCELLED; " in shown, shown
    assert f"`hpc-train evaluate {paths.folder.name} --step STEP` adds the row of a step" in shown, shown
    for step in (20, 40):
        succeed(tmp_path, "evaluate", paths.folder, "--step", str(step))
    assert_evaluated(paths, quiet_runs.of(text=ONE_NODE, environment=ENVIRONMENT))
    assert "  3 of 3 done\n" in succeed(tmp_path, "status", paths.folder).out


def wait_for_rows_or_failures(paths: RunPaths) -> None:
    """Wait until `status` shows that no evaluation waits or runs."""

    def are_over() -> bool:
        return "waiting or running" not in succeed(paths.folder.parents[2], "status", paths.folder).out

    wait_for(are_over, f"the end of all evaluations\n{account(paths)}", LIMIT_S)


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
