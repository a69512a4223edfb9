"""The run that a batch job trains, by the variables that Slurm sets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, UsageError
from hpc_train.launchers.slurm.batch_job import BatchJob, job_time
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.files import write_json


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    folder = tmp_path / "digits" / "submissions" / "20261121-1"
    folder.mkdir(parents=True)
    write_json(folder / "submission.json", {"version": 1, "runs": ["run-a", "run-b", "run-c"]})
    return folder


def of_array(submission: Path, task: str) -> BatchJob:
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": "99"}
    return BatchJob.of(submission, array)


@pytest.mark.parametrize(("task", "run"), [("0", "run-a"), ("1", "run-b"), ("2", "run-c"), (None, "run-a")])
def test_the_run_of_an_array_task_and_of_a_job(submission: Path, task: str | None, run: str) -> None:
    alone = BatchJob.of(submission, {"SLURM_JOB_ID": "12"})
    job = alone if task is None else of_array(submission, task)
    assert (job.paths.folder.name, job.job) == (run, "12" if task is None else f"12_{task}")


def test_a_task_beyond_the_runs_and_no_job_at_all_are_errors(submission: Path) -> None:
    with pytest.raises(BadFileError, match="array task 3"):
        of_array(submission, "3")
    with pytest.raises(UsageError, match="SLURM_JOB_ID"):
        BatchJob.of(submission, {})


@pytest.mark.parametrize(
    ("shown", "expected_s"),
    [
        ("TimeZone=UTC JobId=7 EndTime=1970-01-02T00:00:00 Deadline=N/A", 86400.0),
        ("JobId=7 EndTime=1970-01-02T00:00:00 Deadline=N/A", 86400.0 - 5.5 * 3600),
        ("TimeZone=UTC JobId=7 EndTime=Unknown Deadline=N/A", None),
    ],
)
def test_times_are_in_the_zone_of_the_answer(
    shown: str, expected_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older batch scripts pass times in the node's zone."""
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    try:
        assert job_time("EndTime", {"HPC_TRAIN_JOB": shown}) == expected_s
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("job", "cluster", "recorded", "is_own"),
    [
        ("12", "A", "a", True),
        ("12", "b", "a", False),
        ("13", "a", "a", False),
        ("12", "", "a", True),  # unknown here
        ("12", "a", None, True),  # not recorded by 0.2
    ],
)
def test_an_attempt_belongs_to_the_job_of_its_number_and_cluster(
    submission: Path, job: str, cluster: str, recorded: str | None, is_own: bool
) -> None:
    found = BatchJob.of(submission, {"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": cluster})
    assert found.owns(AttemptRecord(1, "…", [], None, job="12", cluster=recorded)) == is_own
    assert not found.owns(None)
