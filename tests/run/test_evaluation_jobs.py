"""Checkpoints that jobs of their own evaluate: requests, jobs, rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs as jobs
from hpc_train.run.attempts import AttemptRecord, now, write_record
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from hpc_train.run.run_status import RunStatus, read_status, write_status


def row(step: int, split: str = "train", **more: Any) -> dict[str, Any]:
    return {"split": split, "step": step, "loss": 1 / step} | more


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose first attempt trains."""
    paths = RunPaths(tmp_path)
    paths.attempt(1).folder.mkdir(parents=True)
    write_record(paths.attempt(1), AttemptRecord(1, now(), [], None))
    write_status(paths, RunStatus(state="running", step=4, total_steps=9, attempt=1))
    return paths


def commit(run: RunPaths, *steps: int) -> None:
    for step in steps:
        jobs.request(run, step)
        run.checkpoint(step).folder.mkdir(parents=True)
        run.checkpoint(step).manifest.touch()


def test_a_request_is_unfinished_from_the_commit_to_a_row_or_a_failure(run: RunPaths) -> None:
    assert jobs.unfinished(run) == []
    commit(run, 2, 4, 6)
    jobs.request(run, 8)
    assert jobs.unfinished(run) == [2, 4, 6], "8 is not committed"
    jobs.note_job(run, 4, "11")
    jobs.note_job(run, 4, "12")
    assert (jobs.submitted(run), jobs.job_ids(run, 4)) == ([4], ["11", "12"])
    jobs.note_row(run, row(2, "val"))
    jobs.note_failure(run, 6, "no GPU")
    assert (jobs.unfinished(run), jobs.failures(run)) == ([4], {6: "no GPU"})
    words = jobs.in_words(run)
    assert words.startswith("1 of 4 done, 1 waiting or running; step 6 failed: no GPU; `hpc-train evaluate ")
    assert [step for step in (2, 4, 5, 6, 8) if jobs.is_missing(run, step)] == [4, 6, 8]
    jobs.forget_jobs(run, 4)
    assert jobs.in_words(run).startswith("1 of 4 done, 1 not submitted; ")
    jobs.note_row(run, row(6, "val"))
    assert jobs.in_words(run) == "2 of 4 done, 1 not submitted", "the run trains and may submit it"
    assert (jobs.submitted(run), jobs.unfinished(run)) == ([], [4])
    jobs.request(run, 6)  # it is saved again
    assert (jobs.unfinished(run), jobs.failures(run)) == ([4, 6], {})


def test_rows_join_at_their_steps_once_when_nothing_trains(run: RunPaths) -> None:
    commit(run, 2, 4, 5)
    trained = [row(step, time=step) for step in range(1, 6)]
    run.metrics.write_text("".join(f"{json.dumps(each)}\n" for each in [*trained, row(5, "val", time=6)]))
    jobs.note_row(run, row(2, "val", time=99))
    assert len(list(iter_rows(run.metrics))) == 6, "the attempt writes rows"
    write_status(run, RunStatus(state="completed", step=5, total_steps=5, attempt=1))
    for step in (2, 4, 5):
        run.evaluation_job(step, "json").unlink(missing_ok=True)
        jobs.note_row(run, row(step, "val", time=99))
    joined = [(each["step"], each["split"], each["time"]) for each in iter_rows(run.metrics)]
    assert joined == [
        (1, "train", 1), (2, "train", 2), (2, "val", 2), (3, "train", 3), (4, "train", 4), (4, "val", 4),
        (5, "train", 5), (5, "val", 6),
    ]  # fmt: skip


def test_the_best_evaluation_may_be_of_a_job(run: RunPaths) -> None:
    def best() -> dict[str, Any] | None:
        (status,) = statuses([run])
        assert replace(status, best=None) == replace(read_status(run), best=None)
        return status.best

    assert best() is None
    commit(run, 1, 2, 3, 4, 6)
    assert best() is None
    jobs.note_row(run, row(3, "val", accuracy=0.5, epoch=0.9))
    assert best() == {"metric": "accuracy", "value": 0.5, "step": 3, "mode": "max"}
    jobs.note_row(run, row(2, "val", accuracy=0.5))
    jobs.note_row(run, row(6, "val", accuracy=0.9))
    assert best() == {"metric": "accuracy", "value": 0.5, "step": 2, "mode": "max"}, "6 is after the status"
    # An evaluation in training is better, or is not.
    for value, step in ((0.125, 1), (0.25, 4)):
        trained = {"metric": "loss", "value": value, "step": step, "mode": "min"}
        write_status(run, replace(read_status(run), state="completed", best=trained))
        assert best() == trained
    jobs.note_row(run, row(4, "val") | {"loss": 0.125})
    assert best() == trained | {"value": 0.125}
    write_status(run, replace(read_status(run), best=trained | {"step": 1}))
    jobs.note_row(run, row(2, "val") | {"loss": 0.0625})
    assert best() == trained | {"value": 0.0625, "step": 2}


def test_a_resume_takes_rows_up_to_its_step(run: RunPaths) -> None:
    run.metrics.write_text("".join(f"{json.dumps(row(step))}\n" for step in range(1, 6)))
    evaluated = {step: row(step, "val") for step in (2, 3, 4)}
    file = MetricsFile(run.metrics, 3, evaluated)
    assert file.has("val", 3)
    assert [(each["step"], each["split"]) for each in iter_rows(run.metrics)] == [
        (1, "train"), (2, "train"), (2, "val"), (3, "train"), (3, "val"),
    ]  # fmt: skip
    file.append(row(4))
    file.close()
    file.reopened(4, evaluated).close()
    assert [each["step"] for each in iter_rows(run.metrics)][-2:] == [4, 4]
