"""Stages in the queue: none runs twice or after a failed one; a resume lets the later ones follow."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import found_runs, hpc_train, rows, wait_for
from tests.end_to_end.test_stages import TUNE, stages_below
from tests.faults.schedule import chosen_seeds
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
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_first_step,
    wait_for_state,
    wait_for_step,
    write_experiment,
)
from tests.slurm.runs import high_job, squeue, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLURM = "slurm: {partition: low, nodes: 1, ranks_per_node: 1, time_limit: 30min}\n"
FIRST = EXPERIMENT[: EXPERIMENT.index("slurm:")] + SLURM + "recovery: {max_crashes: 0}\n"
STAGES = "stages: [{optimization: {steps: 30}}, tune.yaml, {export: EXPORTED}]\n"
FOUR_STAGES = STAGES.replace("{export", "{evaluate: true}, {export")


def staged_file(folder: Path, stages: str = STAGES, hold: Hold | None = None) -> Path:
    """Write the files of the stages; ``hold``: of the second one, at a step."""
    tune = TUNE.replace("tests.end_to_end.parts:net", "tests.end_to_end.paced:net")
    if hold is not None:
        loggers = hold.override.removeprefix("logging.loggers=")
        tune = tune.replace("every_steps: 1}", f"every_steps: 1, loggers: {loggers}}}")
    write_experiment(folder, tune + SLURM, "tune.yaml")
    return write_experiment(folder, FIRST + stages.replace("EXPORTED", str(folder / "w.safetensors")))


def exported(folder: Path) -> str:
    return hashlib.sha256((folder / "w.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the file that undisturbed stages export."""
    folder = tmp_path_factory.mktemp("alone")
    alone = ("submit", staged_file(folder), "--local", "--devices", "1")
    done = hpc_train(*alone, **ENVIRONMENT, HPC_TRAIN_RUNS=str(folder / "runs"))
    assert done.code == 0, done.err
    return exported(folder)


def reasons(folder: Path) -> dict[str, tuple[str, str]]:
    return {run["id"]: (run["state"], run["reason"]) for run in standing(folder)}


def wait_for_queue(cluster: Cluster, paths: RunPaths, reason: str) -> None:
    def has_reason() -> bool:
        job = squeue(cluster).get(job_of(paths))
        return job is not None and (job.state, job.reason) == ("PENDING", reason)

    wait_for(has_reason, f"{reason} of {job_of(paths)}\n{account(paths)}", LIMIT_S)


@contextmanager
def preemption(cluster: Cluster, paths: RunPaths) -> Iterator[None]:
    """Preempt the newest attempt at the end of the context, unless it ends before; see the next one begin."""
    number = records(paths)[-1].attempt
    yield
    with high_job(cluster, records(paths)[-1].hosts):
        ended = wait_for_attempt_end(paths, number)
    if ended.cause != "completed":
        wait_for_attempt(paths, number + 1)


# The next test preempts two of the stages.
@pytest.mark.soak
@pytest.mark.fault(1, 63)
@pytest.mark.parametrize("seed", chosen_seeds("1"))
def test_randomly_preempted_stages_export_the_same_file(
    seed: int, cluster: Cluster, expected: str, tmp_path: Path
) -> None:
    """Each stage may be preempted at any time; its next attempt continues it, and no stage runs twice."""
    random = Random(f"stages {seed}")
    submitted = succeed(tmp_path, "submit", staged_file(tmp_path, FOUR_STAGES), pace_s=0.3)
    assert submitted.err.count("queued, in") == 4
    stages = stages_below(tmp_path)
    for paths, steps in zip(stages[:2], (30, 12), strict=True):
        for step in sorted(random.sample(range(1, steps - 2), random.choice([1, 2]))):
            wait_for_attempt(paths, 1)
            with preemption(cluster, paths):
                wait_for_step(paths, step)
    for paths in stages[2:]:
        wait_for_attempt(paths, 1)
        with preemption(cluster, paths):
            time.sleep(random.uniform(0, 4))
    wait_for_completion(*stages)
    for paths in stages:
        wait_for_attempt_end(paths, records(paths)[-1].attempt)
    assert exported(tmp_path) == expected
    assert len(found_runs(tmp_path)) == 4
    causes = [[record.cause for record in records(paths)] for paths in stages]
    for paths, ends in zip(stages, causes, strict=True):
        assert ends == ["preemption"] * (len(ends) - 1) + ["completed"], account(paths)
        assert {record.job for record in records(paths)} == {job_of(paths)}, account(paths)
        assert len(json.loads(paths.run.read_text())["slurm_job_ids"]) == 1, account(paths)
    assert all(len(ends) > 1 for ends in causes[:2]), causes
    for paths in stages[:2]:
        assert_each_step_once(paths)
    (row,) = rows(stages[2], "val")
    assert row == {key: value for key, value in rows(stages[1], "val")[-1].items() if key in row}


def assert_each_step_once(paths: RunPaths) -> None:
    steps_trained = [row["step"] for row in rows(paths, "train")]
    assert steps_trained == sorted(set(steps_trained)), "each step has one row"


@pytest.mark.fault(1, 61)
def test_stages_follow_after_preemptions_a_crash_and_a_resume(
    cluster: Cluster, expected: str, tmp_path: Path
) -> None:
    queued = tmp_path / "queued"
    hold = Hold(queued, 3)
    file = staged_file(queued, FOUR_STAGES, hold)
    assert succeed(queued, "submit", file, pace_s=0.3).err.count("queued, in") == 4
    first, tuned, evaluated, export = stages_below(queued)
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
    wait_for_step(tuned, 3)
    see_it_preempted(cluster, tuned)
    hold.release()
    wait_for_completion(first, tuned, evaluated, export)
    assert [len(records(paths)) for paths in (first, tuned, evaluated, export)] == [3, 2, 1, 1]
    assert job_of(tuned) != early and job_of(tuned) == str(records(tuned)[1].job)
    assert len(found_runs(queued)) == 4
    assert exported(queued) == expected
    for paths in (first, tuned):
        assert_each_step_once(paths)
    (row,) = rows(evaluated, "val")
    assert row == {key: value for key, value in rows(tuned, "val")[-1].items() if key in row}


@pytest.mark.fault(62)
def test_a_cancelled_stage_takes_later_ones_out_of_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    succeed(tmp_path, "submit", staged_file(tmp_path), pace_s=0.3)
    first, *later = stages_below(tmp_path)
    wait_for_step(first, 2)
    succeed(tmp_path, "cancel", first.folder.name)
    assert {state_ for state_, _ in reasons(tmp_path).values()} == {"cancelled"}
    assert not any(paths.attempt_folders() for paths in later)
    for paths in later:
        assert state(cluster, job_of(paths)) == "CANCELLED"
