"""Runs sbatch so that a job is submitted once, even with retries.

sbatch can fail although the job is queued (a lost answer, a killed command), so before a retry the queue is
searched for a job whose script is in the submission's folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import NoSchedulerError, shortened
from hpc_train.launchers.base import JobArray
from hpc_train.launchers.slurm import commands, script
from hpc_train.launchers.slurm.submission import Batch
from hpc_train.paths import SubmissionPaths

#: Assumed: a restart of slurmctld takes less. The command can be repeated afterwards.
LIMIT_S = 120.0
_PAUSE_MAX_S = 10.0
#: A site's filters and plug-ins may be slow; after that sbatch is considered hung.
_SBATCH_LIMIT_S = 300.0
#: sbatch's own line; a wrapper may ignore ``--parsable``.
_SENTENCE = re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
#: Slurm's messages about a job for which it has too few nodes, or too few usable nodes.
TOO_FEW_NODES = re.compile(r"configuration is not available|node name", re.IGNORECASE)


def check_programs() -> None:
    """Raise NoSchedulerError if Slurm is not installed, before files are created for a submission."""
    for program in ("sbatch", "squeue", "scontrol", "srun"):  # srun is looked for by submitit
        if shutil.which(program) is None:
            raise NoSchedulerError(
                f"{program}: no such program here; is this a login node of the cluster? Load Slurm's module, "
                "or add --local to train on this machine"
            )


class NumberUnknownError(commands.NoAnswerError):
    """sbatch has submitted the job, but its output does not contain the job's number."""


def send(paths: SubmissionPaths, batch: Batch, runs: int) -> str:
    """Make sure that one held job of this number of runs is queued, and return its number.

    Raises NoSchedulerError if Slurm has not answered for ``LIMIT_S``, RefusedError if it refuses.
    """
    deadline, pause_s = time.monotonic() + LIMIT_S, 1.0
    is_unclear, is_submitted = False, False
    while True:
        try:
            job = own_job(paths) if is_unclear else None
            if job is None and is_submitted:
                raise NumberUnknownError("sbatch has submitted the job, but squeue does not list it yet")
            job = job or sbatch(batch, runs)
            duplicates = [other for other in _own_jobs(paths) if other != job] if is_unclear else []
            if duplicates:
                commands.cancel_jobs(duplicates)
            return job
        except commands.NoAnswerError as error:
            is_submitted = is_submitted or isinstance(error, NumberUnknownError)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoSchedulerError(f"{error}; gave up after {LIMIT_S:g} s") from error
            say(f"{error}; tries again for {left_s:.0f} s more")
        is_unclear = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def own_job(paths: SubmissionPaths) -> str | None:
    """Return the submission's job that waits or runs; the older one if a lost answer led to two."""
    jobs = _own_jobs(paths)
    return jobs[0] if jobs else None


def _own_jobs(paths: SubmissionPaths) -> list[str]:
    # By the path's end: the runs folder may have several names.
    folder = f"/{paths.folder.parent.name}/{paths.token}/"
    return sorted((job for job, path in commands.own_jobs() if folder in path), key=int)


def could_start(batch: Batch) -> bool:
    """Return True if Slurm has the nodes that the script requests, free or not, or if this is unknown."""
    try:
        tested(batch)
    except commands.RefusedError as error:
        return not TOO_FEW_NODES.search(error.words)
    return True


def tested(batch: Batch, runs: int = 1) -> str:
    """Return the output of ``sbatch --test-only`` for the job of this number of runs: times in UTC.

    Raises RefusedError if Slurm would refuse it, or could not start it now.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.sh")
        path.write_text(script.script_text(batch, runs), encoding="utf-8")
        environ = script.job_environment(batch.parameters, os.environ)
        return commands.run(["sbatch", "--test-only", str(path)], environ=environ)


def sbatch(batch: Batch, runs: int = 1) -> str:
    """Write the script for this number of runs and submit it; return the job's number.

    Raises NumberUnknownError if the output does not contain it.
    """
    path = batch.submission / "batch.sh"
    path.write_text(script.script_text(batch, runs), encoding="utf-8")
    if batch.evaluation is not None:
        evaluation = SubmissionPaths(batch.submission).evaluation_script
        evaluation.write_text(batch.evaluation, encoding="utf-8")
        evaluation.chmod(0o600)  # it is refused if others can write it
    environ = script.job_environment(batch.parameters, os.environ)
    return submitted_number(["--parsable", str(path)], environ)


def submitted_array(array: JobArray, text: str) -> str:
    """Write the script of an array of jobs, which are numbered from 1, and submit it; return its number.

    Raises NoSchedulerError without trying again: the array may be queued although sbatch has failed.
    """
    path = array.folder / "batch.sh"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    arguments = ["--parsable", f"--array=1-{array.count}", str(path), str(array.run.folder.absolute())]
    return submitted_number(arguments, script.job_environment({"additional_parameters": {}}, os.environ))


def submitted_number(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run sbatch with these arguments, including ``--parsable``; return the job's number."""
    output = commands.run(["sbatch", *arguments], limit_s=_SBATCH_LIMIT_S, environ=environ)
    number = job_number(output)
    if number is None:
        shown = shortened(output, 200)
        raise NumberUnknownError(f"sbatch has submitted the job, but did not print one number: {shown!r}")
    return number


def job_number(output: str) -> str | None:
    """Return the number in sbatch's own complete line; None without one, or if several differ."""
    lines = [line.strip() for line in output.split("\n")[:-1]]
    for pattern in (_SENTENCE, _PARSABLE):
        numbers = {match[1] for line in lines if (match := pattern.fullmatch(line))}
        if numbers:
            return numbers.pop() if len(numbers) == 1 else None
    return None
