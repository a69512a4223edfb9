"""sbatch, through submitit: called once, however often Slurm has to be asked.

sbatch can fail with the job queued all the same (an answer that was lost, a command that died), so nobody
calls it again without having looked for a job of ours: one whose script is in the submission's folder.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.entry import Entry
from hpc_train.launchers.slurm import commands, script
from hpc_train.launchers.slurm.script import Batch
from hpc_train.paths import SubmissionPaths

#: Assumed: a restart of slurmctld takes less. The command can be given again afterwards.
LIMIT_S = 120.0
_PAUSE_MAX_S = 10.0
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


def send(paths: SubmissionPaths, batch: Batch, folders: Sequence[Path]) -> str:
    """Have one held job of the run ``folders`` in the queue and return its number.

    Raises NoSchedulerError where Slurm has not answered for ``LIMIT_S``, RefusedError where it says no.
    """
    deadline, pause_s = time.monotonic() + LIMIT_S, 1.0
    is_unclear = False
    while True:
        try:
            found = own_job(paths) if is_unclear else None
            found = found or sbatch(batch, folders)
            if is_unclear:
                _cancel_others(paths, found)
            return found
        except commands.NoAnswerError as error:
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
    with tempfile.TemporaryDirectory() as folder, script.clean_environment(batch.parameters):
        path = Path(folder, "script.sh")
        path.write_text(script.script_text(batch, runs), encoding="utf-8")
        return commands.run(["sbatch", "--test-only", str(path)])


def sbatch(batch: Batch, folders: Sequence[Path]) -> str:
    """Let submitit write the script and call sbatch; return the job's number."""
    from submitit.core.utils import FailedJobError

    executor = script.executor(batch)
    entries = [Entry(folder) for folder in folders]
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what sbatch said, besides raising it
            jobs = [executor.submit(entries[0])] if len(entries) == 1 else executor.submit_array(entries)
    except FailedJobError as error:
        raise commands.failure(["sbatch"], str(error)) from None
    return str(jobs[0].job_id).partition("_")[0]
