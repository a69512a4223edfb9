"""Stages in the queue: none starts twice or after a failed one; a resume lets the later ones follow."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import found_runs, hpc_train, wait_for
from tests.end_to_end.test_stages import TUNE, stages_below
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    account,
    job_of,
    ranks_of,
    records,
    see_it_preempted,
    standing,
    succeed,
    wait_for_attempt,
    wait_for_completion,
    wait_for_first_step,
    wait_for_state,
    wait_for_step,
    write_experiment,
)
from tests.slurm.runs import squeue, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLURM = "slurm: {partition: low, nodes: 1, ranks_per_node: 1, time_limit: 30min}\n"
FIRST = EXPERIMENT[: EXPERIMENT.index("slurm:")] + SLURM + "recovery: {max_crashes: 0}\n"
STAGES = "stages: [{optimization: {steps: 30}}, tune.yaml, {export: EXPORTED}]\n"


def staged_file(folder: Path) -> Path:
    write_experiment(folder, TUNE + SLURM, "tune.yaml")
    return write_experiment(folder, FIRST + STAGES.replace("EXPORTED", str(folder / "w.safetensors")))


def reasons(folder: Path) -> dict[str, tuple[str, str]]:
    return {run["id"]: (run["state"], run["reason"]) for run in standing(folder)}


def wait_for_queue(cluster: Cluster, paths: RunPaths, reason: str) -> None:
    def has_reason() -> bool:
        job = squeue(cluster).get(job_of(paths))
        return job is not None and (job.state, job.reason) == ("PENDING", reason)

    wait_for(has_reason, f"{reason} of {job_of(paths)}\n{account(paths)}", LIMIT_S)


def test_stages_follow_after_a_preemption_a_crash_and_a_resume(cluster: Cluster, tmp_path: Path) -> None:
    queued, local = tmp_path / "queued", tmp_path / "local"
    assert succeed(queued, "submit", staged_file(queued), pace_s=0.3).err.count("queued, in") == 3
    first, tuned, exported = stages_below(queued)
    name = first.folder.name
    wait_for_queue(cluster, tuned, "Dependency")
    assert reasons(queued)[tuned.folder.name] == ("pending", f"waits for {name}")

    wait_for_step(first, 2)
    see_it_preempted(cluster, first)
    wait_for_attempt(first, 2)
    assert job_of(first) == str(records(first)[1].job)
    wait_for_queue(cluster, tuned, "Dependency")

    wait_for_first_step(first)
    for rank in ranks_of(first):
        os.kill(rank, signal.SIGKILL)
    assert wait_for_state(first, "failed", "completed") == "failed", account(first)
    wait_for_queue(cluster, tuned, "DependencyNeverSatisfied")
    waits = f"waits for {name}, which is failed; `hpc-train resume {name}` lets this one follow"
    assert reasons(queued)[tuned.folder.name] == ("pending", waits)
    # If somebody starts the job nevertheless, it begins no attempt.
    early = job_of(tuned)
    cluster.run("scontrol", "update", f"JobId={early}", "Dependency=")
    wait_for(lambda: state(cluster, early) not in {"PENDING", "RUNNING", "COMPLETING"}, early, LIMIT_S)
    assert not tuned.attempt_folders(), account(tuned)
    assert reasons(queued)[tuned.folder.name] == ("pending", waits)

    succeed(queued, "resume", "digits")
    wait_for_completion(first, tuned, exported)
    assert [len(records(paths)) for paths in (first, tuned, exported)] == [3, 1, 1]
    assert job_of(tuned) != early
    assert len(found_runs(queued)) == 3

    alone = ("submit", staged_file(local), "--local", "--devices", "1")
    done = hpc_train(*alone, **ENVIRONMENT, HPC_TRAIN_RUNS=str(local / "runs"))
    assert done.code == 0, done.err
    digests = {hashlib.sha256((folder / "w.safetensors").read_bytes()).digest() for folder in (queued, local)}
    assert len(digests) == 1


def test_a_cancelled_stage_takes_later_ones_out_of_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    succeed(tmp_path, "submit", staged_file(tmp_path), pace_s=0.3)
    first, *later = stages_below(tmp_path)
    wait_for_step(first, 2)
    succeed(tmp_path, "cancel", first.folder.name)
    assert {state_ for state_, _ in reasons(tmp_path).values()} == {"cancelled"}
    assert not any(paths.attempt_folders() for paths in later)
    for paths in later:
        assert state(cluster, job_of(paths)) == "CANCELLED"
