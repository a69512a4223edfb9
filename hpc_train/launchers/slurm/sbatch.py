"""sbatch: called once, however often Slurm has to be asked.

sbatch can fail with the job queued all the same (an answer that was lost, a command that died), so nobody
calls it again without having looked for a job of ours: one whose script is in the submission's folder.
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
from hpc_train.errors import NoSchedulerError, printable, shortened
from hpc_train.launchers.slurm import commands, script
from hpc_train.launchers.slurm.script import Batch
from hpc_train.paths import SubmissionPaths

#: Assumed: a restart of slurmctld takes less. The command can be given again afterwards.
LIMIT_S = 120.0
_PAUSE_MAX_S = 10.0
#: A site's filters and plug-ins may take their time; after that sbatch is taken to hang.
_SBATCH_LIMIT_S = 300.0
#: sbatch's own line; a wrapper may ignore ``--parsable``.
_SENTENCE = re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
#: What Slurm says of a job for which it has too few nodes, or too few that can be used now.
TOO_FEW_NODES = re.compile(r"configuration is not available|node name", re.IGNORECASE)


def check_programs() -> None:
    """Raise NoSchedulerError where Slurm is not installed: before anything is made that would wait for it."""
    for program in ("sbatch", "squeue", "scontrol", "srun"):  # srun is looked for by submitit
        if shutil.which(program) is None:
            raise NoSchedulerError(
                f"{program}: no such program here; is this a login node of the cluster? Load Slurm's module, "
                "or add --local to train on this machine"
            )


class NumberUnknownError(commands.NoAnswerError):
    """sbatch has submitted the job, but its output does not tell the job's number."""


def send(paths: SubmissionPaths, batch: Batch, runs: int) -> str:
    """Have one held job of this number of runs in the queue and return its number.

    Raises NoSchedulerError where Slurm has not answered for ``LIMIT_S``, RefusedError where it says no.
    """
    deadline, pause_s = time.monotonic() + LIMIT_S, 1.0
    is_unclear, is_submitted = False, False
    while True:
        try:
            job = own_job(paths) if is_unclear else None
            if job is None and is_submitted:
                raise NumberUnknownError("sbatch has submitted the job, but squeue does not list it yet")
            job = job or sbatch(batch, runs)
            if is_unclear:
                _cancel_others(paths, job)
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
    """Return the submission's job that waits or runs, the oldest of two where an answer was lost."""
    found = _own_jobs(paths)
    return found[0] if found else None


def _own_jobs(paths: SubmissionPaths) -> list[str]:
    # By the path's end: the runs folder may have several names.
    folder = f"/{paths.folder.parent.name}/{paths.token}/"
    return sorted((job for job, path in commands.own_jobs() if folder in path), key=int)


def _cancel_others(paths: SubmissionPaths, job: str) -> None:
    if others := [other for other in _own_jobs(paths) if other != job]:
        commands.cancel_jobs(others)


def could_start(batch: Batch) -> bool:
    """Tell whether Slurm has the nodes that the script asks for, free or not; True where it won't say."""
    try:
        tested(batch)
    except commands.RefusedError as error:
        return not TOO_FEW_NODES.search(error.words)
    return True


def tested(batch: Batch, runs: int = 1) -> str:
    """Return what ``sbatch --test-only`` says of the job of this number of runs: times in UTC.

    Raises RefusedError where Slurm would refuse it, or could not start it as things are.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.sh")
        path.write_text(script.script_text(batch, runs), encoding="utf-8")
        environ = script.job_environment(batch.parameters, os.environ)
        return commands.run(["sbatch", "--test-only", str(path)], environ=environ)


def sbatch(batch: Batch, runs: int = 1) -> str:
    """Write the script for this number of runs and submit it; return the job's number.

    Raises NumberUnknownError if the output does not tell which number that is.
    """
    path = batch.submission / "batch.sh"
    path.write_text(script.script_text(batch, runs), encoding="utf-8")
    environ = script.job_environment(batch.parameters, os.environ)
    return submitted_number(["--parsable", str(path)], environ)


def submitted_number(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run sbatch with these arguments, which include ``--parsable``; return the job's number.

    Whatever a site's wrapper or plug-in prints besides is ignored.
    """
    output = commands.run(["sbatch", *arguments], limit_s=_SBATCH_LIMIT_S, environ=environ)
    number = job_number(output)
    if number is None:
        shown = shortened(printable(output), 200)
        raise NumberUnknownError(f"sbatch has submitted the job, but did not print one number: {shown!r}")
    return number


def job_number(output: str) -> str | None:
    """Return the number in sbatch's own line; None without such a line, or if several differ.

    Without a line break at its end a line may be incomplete.
    """
    lines = [line.strip() for line in output.split("\n")[:-1]]
    for pattern in (_SENTENCE, _PARSABLE):
        numbers = {match[1] for line in lines if (match := pattern.fullmatch(line))}
        if numbers:
            return numbers.pop() if len(numbers) == 1 else None
    return None
