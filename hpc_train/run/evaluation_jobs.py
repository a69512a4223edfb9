"""``evaluation.as_job``: the checkpoints that jobs of their own evaluate, and the rows of those that have.

Rank 0 requests an evaluation when it begins to save the checkpoint. The launcher submits a job once the
checkpoint is committed, and the job leaves a row or the reason of its failure. A row joins ``metrics.jsonl``
at the step of its checkpoint: by rank 0 while it trains, else at the end of the attempt or of the job.
``status.json`` has the best evaluation of the rows before the attempt: readers add those of jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number, no_claims, read_record
from hpc_train.run.best import Best, BestSoFar, shown_after
from hpc_train.run.file_shapes import decoded
from hpc_train.run.files import read_json, tail_text, write_json, write_text
from hpc_train.run.find import run_name
from hpc_train.run.metric_rows import POSITION, MetricsFile, Row, evaluation_rows
from hpc_train.run.run_status import GOING_ON, RunStatus, read_status

#: Set for ranks whose launcher submits the jobs; without it they evaluate in training.
VARIABLE = "HPC_TRAIN_EVALUATION_JOBS"
_REASON_BYTES = 1 << 12


def request(paths: RunPaths, step: int) -> None:
    """Request the evaluation of the checkpoint of ``step``, which is about to be saved, perhaps again."""
    paths.evaluation_jobs.mkdir(exist_ok=True)
    for ending in ("json", "failed", "jobs"):
        paths.evaluation_job(step, ending).unlink(missing_ok=True)
    paths.evaluation_job(step, "due").touch()


def unfinished(paths: RunPaths) -> list[int]:
    """Return the steps whose checkpoints are committed and wait for the end of their evaluation."""
    return [
        step
        for step in _steps(paths, "due")
        if not any(paths.evaluation_job(step, ending).exists() for ending in ("json", "failed"))
        and paths.checkpoint(step).manifest.exists()
    ]


def submitted(paths: RunPaths) -> list[int]:
    """Return the unfinished steps for which a job was submitted."""
    return [step for step in unfinished(paths) if job_ids(paths, step)]


def job_ids(paths: RunPaths, step: int) -> list[str]:
    """Return the ids of the jobs that were submitted for a step, the newest last."""
    path = paths.evaluation_job(step, "jobs")
    ids = path.read_text("utf-8").split() if path.exists() else []
    return [job for job in ids if job.isdecimal()]


def note_job(paths: RunPaths, step: int, job: str) -> None:
    """Record a job that was submitted for a step."""
    write_text(paths.evaluation_job(step, "jobs"), "\n".join([*job_ids(paths, step), job, ""]), sync=True)


def forget_jobs(paths: RunPaths, step: int) -> None:
    """Forget the jobs of a step, which were cancelled: a resumed run submits it again."""
    paths.evaluation_job(step, "jobs").unlink(missing_ok=True)


def is_missing(paths: RunPaths, step: int) -> bool:
    """Return True if the evaluation of the checkpoint of ``step`` was requested and has no row."""
    exists = {ending: paths.evaluation_job(step, ending).exists() for ending in ("due", "json")}
    return exists["due"] and not exists["json"]


def note_row(paths: RunPaths, row: Row) -> None:
    """Record the row of an evaluation, and join it unless an attempt is writing rows."""
    write_json(paths.evaluation_job(row["step"], "json"), row, sync=True)
    paths.evaluation_job(row["step"], "failed").unlink(missing_ok=True)
    record = read_record(paths.attempt(newest_number(paths)))
    if read_status(paths).state == "completed" or (record is not None and record.end is not None):
        join(paths)


def note_failure(paths: RunPaths, step: int, reason: str) -> None:
    """Record why the checkpoint of ``step`` could not be evaluated, for good."""
    write_text(paths.evaluation_job(step, "failed"), f"{reason}\n", sync=True)


def failures(paths: RunPaths) -> dict[int, str]:
    """Return step → reason of the evaluations that have failed for good."""
    return {
        step: tail_text(paths.evaluation_job(step, "failed"), _REASON_BYTES).strip()
        for step in _steps(paths, "failed")
    }


def rows(paths: RunPaths) -> dict[int, Row]:
    """Return step → row of the evaluations that have ended."""
    read = ((step, read_json(paths.evaluation_job(step, "json"))) for step in _steps(paths, "json"))
    return {step: row for step, row in read if row is not None and row.get("step") == step}


def with_best(paths: RunPaths, status: RunStatus) -> RunStatus:
    """Return the run's ``status`` with the best evaluation so far, those of jobs included."""
    if not paths.evaluation_jobs.is_dir():
        return status
    evaluations = {
        step: {name: row[name] for name in row if name not in POSITION}
        for step, row in rows(paths).items()
        if step <= status.step
    }
    shown, best = None, decoded(Best, status.best)
    if status.best is not None and best is not None:
        shown = BestSoFar(best.metric, "min" if status.best.get("mode") == "min" else "max")
        evaluations.setdefault(best.step, {best.metric: best.value})
    for step in sorted(evaluations):
        shown = shown_after(shown, step, evaluations[step])
    return replace(status, best=None if shown is None else shown.to_json())


def in_words(paths: RunPaths) -> str:
    """Return ``2 of 4 done, 1 waiting or running; step 20 failed: …``; empty if none was requested.

    If rows will be missing, followed by the command that adds one.
    """
    number = len(list(_steps(paths, "due")))
    if not number:
        return ""
    failed, waiting = failures(paths), len(submitted(paths))
    left = len(unfinished(paths)) - waiting
    counts = [f"{len(rows(paths))} of {number} done"] + [f"{waiting} waiting or running"] * (waiting > 0)
    parts = [", ".join(counts + [f"{left} not submitted"] * (left > 0))]
    parts += [f"step {step} failed: {reason}" for step, reason in failed.items()]
    if failed or (left and read_status(paths).state not in GOING_ON):
        parts.append(f"`hpc-train evaluate {run_name(paths)} --step STEP` adds the row of a step")
    return "; ".join(parts)


def join(paths: RunPaths) -> None:
    """Add the rows of ended evaluations to ``metrics.jsonl``; no attempt may be writing it."""
    with no_claims(paths):
        ended = rows(paths)
        if ended.keys() - {row["step"] for row in evaluation_rows(paths.metrics)}:
            MetricsFile(paths.metrics, sys.maxsize, ended).close()


def _steps(paths: RunPaths, ending: str) -> Iterator[int]:
    names = (path.stem.removeprefix("step-") for path in sorted(_files(paths, ending)))
    return (int(name) for name in names if name.isdecimal())


def _files(paths: RunPaths, ending: str) -> Iterator[Path]:
    return paths.evaluation_jobs.glob(f"step-*.{ending}")
