"""Submits the jobs of ``evaluation.as_job``, and cancels them.

``python -m hpc_train.launchers.slurm.evaluations SUBMISSION`` is called by the batch script, on the first
node, when a checkpoint is due and has no job; ``after`` calls it for the last ones. A job is found by its
name, which is unique to run and step, so none is submitted twice.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import HpcTrainError
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.batch_job import BatchJob, say
from hpc_train.launchers.slurm.queue import FORGOTTEN, JobState
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.trust import check_own

#: Jobs that were submitted for one evaluation and left neither a row nor a reason, as after a lost node.
_MOST_JOBS = 3


def submit(job: BatchJob, environ: Mapping[str, str]) -> None:
    """Submit a job for each committed checkpoint that is due and has none.

    Raises NoSchedulerError, RefusedError or OSError; a later call submits what is left.
    """
    from filelock import FileLock

    if not evaluation_jobs.unfinished(job.paths):
        return
    with FileLock(job.submission.evaluation_lock, timeout=commands.LIMIT_S):
        # First: a job that ends meanwhile has left its row when the steps are listed.
        waiting = _jobs_by_name()
        for step in evaluation_jobs.unfinished(job.paths):
            if job.paths.cancelled.exists():
                break
            ids = evaluation_jobs.job_ids(job.paths, step)
            name = job_name(job.paths, step)
            if name in waiting:
                if waiting[name] not in ids:  # a call that was killed has submitted it
                    evaluation_jobs.note_job(job.paths, step, waiting[name])
            elif len(ids) >= _MOST_JOBS:
                reason = f"jobs {', '.join(ids)} ended without a result"
                evaluation_jobs.note_failure(job.paths, step, reason)
                say(f"evaluation of step {step}: {reason}")
            else:
                number = _sbatch(job, step, name, environ)
                evaluation_jobs.note_job(job.paths, step, number)
                say(f"evaluation of step {step}: job {number}")
    if job.paths.cancelled.exists():  # meanwhile
        cancel([job.paths])


def job_name(paths: RunPaths, step: int) -> str:
    """Return the name of the job that evaluates the run's checkpoint of ``step``."""
    folder = hashlib.sha256(os.fsencode(paths.folder.absolute())).hexdigest()
    return f"{paths.folder.name}-evaluation-{step}-{folder[:8]}"


def _jobs_by_name() -> dict[str, str]:
    """Return name → id of this user's jobs that wait or run."""
    output = commands.run(["squeue", "--noheader", f"--user={os.getuid()}", "--format=%A|%j"])
    pairs = (line.strip().partition("|") for line in output.splitlines())
    return {name: job for job, _, name in pairs if job.isdigit()}


def _sbatch(job: BatchJob, step: int, name: str, environ: Mapping[str, str]) -> str:
    from hpc_train.launchers.slurm import sbatch, script  # a second, for the schema

    path = job.submission.evaluation_script
    check_own(path)
    arguments = ["--parsable", f"--job-name={name}", str(path), str(job.paths.folder.absolute()), str(step)]
    return sbatch.submitted_number(arguments, script.job_environment({"additional_parameters": {}}, environ))


def end_attempt(job: BatchJob, environ: Mapping[str, str]) -> None:
    """Submit what is left once the ranks have ended, and join the rows of ended evaluations.

    Never raises: the attempt's end does not depend on it.
    """
    try:
        evaluation_jobs.join(job.paths)
        submit(job, environ)
    except (HpcTrainError, OSError) as error:
        say(f"evaluations: {error}")


def note_end(paths: RunPaths, step: int, job: JobState | None) -> None:
    """Record that an evaluation has failed if its job has ended and left no result.

    For a run that has ended: while it trains, its batch script submits another job.
    """
    if job is None or not job.is_over or job.has_just_ended or job.may_reappear:
        return
    if step not in evaluation_jobs.unfinished(paths):  # its result has come meanwhile
        return
    is_own = job.name in {job_name(paths, step), None}
    how = "it is no longer in the queue" if job.state == FORGOTTEN or not is_own else job.state
    with suppress(OSError):  # another user's run, or a full disk: it is recorded another time
        evaluation_jobs.note_failure(paths, step, f"job {job.job} ended without a result: {how}")


def cancel(runs: Sequence[RunPaths]) -> None:
    """End the jobs that evaluate the runs' checkpoints."""
    steps = {paths: evaluation_jobs.submitted(paths) for paths in runs}
    ids = [job for paths in runs for step in steps[paths] for job in evaluation_jobs.job_ids(paths, step)]
    if ids:
        commands.cancel_jobs(ids)
    for paths in runs:
        for step in steps[paths]:
            evaluation_jobs.forget_jobs(paths, step)


def main(arguments: Sequence[str]) -> int:
    """Submit the jobs of the run of this batch script; return 1 if that must be tried again."""
    (folder,) = arguments
    try:
        submit(BatchJob.of(Path(folder).absolute(), os.environ), os.environ)
    except (HpcTrainError, OSError) as error:
        say(f"evaluations: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
