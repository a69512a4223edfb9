"""What the batch script calls before srun, on the first node: claims the attempt and says where it lies.

``python -m hpc_train.launchers.slurm.begin SUBMISSION`` prints attempt, token and run folder, tab-separated;
nothing where the run must not start. What goes wrong is told on stderr and by the exit code.
"""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, TryAgainError, UsageError, UserError
from hpc_train.launchers.outcome import one_line
from hpc_train.launchers.slurm import LAUNCHER, commands
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.run_folder import snapshot
from hpc_train.run_folder.attempts import (
    AttemptRecord,
    claim_attempt,
    now,
    now_ms,
    write_record,
)
from hpc_train.run_folder.ends import exit_codes
from hpc_train.run_folder.events import noted_signal
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.liveness import end_living, living, newest_record
from hpc_train.run_folder.processes import Process
from hpc_train.run_folder.status import read_status, write_status
from hpc_train.runtime.ranks import parse_tasks_per_node

#: Begins an attempt's part of the batch script's output, which all attempts of a job append to.
MARK = "hpc-train: attempt"
_SCONTROL_LIMIT_S = 60.0


@dataclass(frozen=True)
class BatchJob:
    """The job that this process runs in, and its run."""

    paths: RunPaths
    submission: SubmissionPaths
    #: ``12_3`` of an array, else ``12``: SLURM_JOB_ID of an array's last task means the whole array.
    job: str
    restart: int

    @classmethod
    def of(cls, folder: Path, environ: Mapping[str, str]) -> BatchJob:
        """Raises UsageError outside of a job, BadFileError where the submission does not know its task."""
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
        if not job:
            raise UsageError("SLURM_JOB_ID: not set; this is called by the batch script that submit makes")
        submission = SubmissionPaths(folder)
        run_id = _run_id(submission, int(task) if array and task else 0)
        return cls(
            RunPaths(folder.parent.parent / run_id),
            submission,
            job,
            int(environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def owns(self, record: AttemptRecord | None) -> bool:
        return record is not None and record.slurm_job == self.job


def _run_id(submission: SubmissionPaths, task: int) -> str:
    runs = (read_json(submission.record) or {}).get("runs")
    run_id = runs[task] if isinstance(runs, list) and task < len(runs) else None
    # A plain name: another would lead out of the experiment's folder.
    if not isinstance(run_id, str) or run_id != Path(run_id).name or run_id in {"", ".", ".."}:
        raise BadFileError(
            f"{submission.record}: knows no run of array task {task}; submit the experiment again"
        )
    return run_id


def begin(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Claim the attempt; return the line to print, or None where the run must not start.

    Raises TryAgainError where another attempt goes on, UserError where others could have written its code.
    """
    job = BatchJob.of(folder, environ)
    began = now_ms()
    if ended := _why_not(job.paths):
        say(f"run {job.paths.folder.name} is {ended}; nothing to do")
        return None
    try:
        _check_trusted(job)
        number = _claimed(job, environ, began)
    except TryAgainError:
        raise
    except HpcTrainError as error:
        status = read_status(job.paths)
        write_status(job.paths, replace(status, state="failed", reason=one_line(str(error))))
        raise
    status = read_status(job.paths)
    write_status(job.paths, replace(status, state="running", attempt=number, reason=None))
    say(f"{MARK[len('hpc-train: ') :]} {number} of run {job.paths.folder.name}, job {job.job}, {now()}")
    return f"{number}\t{secrets.token_hex(16)}\t{job.paths.folder}"


def _why_not(paths: RunPaths) -> str | None:
    if paths.cancelled.exists():
        return "cancelled"
    return "completed" if read_status(paths).state == "completed" else None


def _check_trusted(job: BatchJob) -> None:
    """Raise UserError where others could have written what the ranks will run."""
    folder = job.submission.folder
    for path in [folder, *folder.glob("*.pkl")]:
        seen = path.stat()
        if seen.st_uid not in {0, os.geteuid()} or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(
                f"{path}: others may write it, so it is not run; `chmod go-w` it, and submit the run again"
            )
    code = snapshot.linked(job.paths)
    if code is not None:
        snapshot.check_owner(code)


def _claimed(job: BatchJob, environ: Mapping[str, str], began: str) -> int:
    """Return the number of this job's attempt: a new one, unless this batch script has claimed it before."""
    record, script = newest_record(job.paths), _batch_script(environ)
    if record is not None and record.end is None:
        if job.owns(record) and record.restart == job.restart and record.launcher_process == script:
            return record.attempt
        _end_earlier(job, record)
    return claim_attempt(
        job.paths,
        LAUNCHER,
        slurm_job=job.job,
        restart=job.restart,
        hosts=_hosts(environ),
        ranks=_num_ranks(environ),
        events={"begin": began},
        launcher_process=script,
    )


def _batch_script(environ: Mapping[str, str]) -> Process:
    """Return the batch script's process: it lives as long as the attempt, which this one does not."""
    task = environ.get("SLURM_TASK_PID", "")  # the parent may be a container's starter
    found = Process.of(int(task)) if task.isdecimal() else None
    return found or Process.of(os.getppid()) or Process.current()


def _end_earlier(job: BatchJob, record: AttemptRecord) -> None:
    """See to it that the attempt before, which has no end on record, is over. Raises TryAgainError."""
    is_own = job.owns(record) and record.restart != job.restart
    # What Slurm has given up and started anew is over, though its processes may still live on a lost node:
    # they commit nothing once this attempt stands.
    if not is_own and (living(record) or _is_running(record)):
        raise TryAgainError(
            f"attempt {record.attempt} of run {job.paths.folder.name} goes on "
            f"({record.launcher or 'its launcher'} on {', '.join(record.hosts) or 'another machine'}); "
            "this job ends"
        )
    if not is_own:
        end_living(job.paths)
    write_record(job.paths.attempt(record.attempt), lost(job.paths, record))


def _is_running(record: AttemptRecord) -> bool:
    """Tell whether Slurm surely runs the job of another submission."""
    if record.launcher != LAUNCHER or record.slurm_job is None:
        return False
    with suppress(HpcTrainError):  # where Slurm does not answer, ownership keeps the run whole
        listed = commands.run(["squeue", "--noheader", "--format=%T", f"--jobs={record.slurm_job}"])
        return listed.strip() in {"RUNNING", "COMPLETING", "SUSPENDED"}
    return False


def lost(paths: RunPaths, record: AttemptRecord) -> AttemptRecord:
    """Return the record of an attempt that ended without a word, with what its files tell."""
    attempt = paths.attempt(record.attempt)
    signal, cause = noted_signal(attempt), "lost"
    has_stopped = "saved" in record.events or exit_codes(attempt).get(0) == ExitCode.TRY_AGAIN
    if signal is not None and has_stopped:
        cause = "time limit" if signal == "SIGUSR2" else "preemption"
    reason = f"{cause}: it ended before its batch script could say how"
    return replace(record, end=_last_word(attempt.folder) or now(), cause=cause, reason=reason)


def _last_word(folder: Path) -> str | None:
    with suppress(OSError):
        latest = max((path.stat().st_mtime for path in folder.iterdir()), default=None)
        if latest is not None:
            return datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
    return None


def _hosts(environ: Mapping[str, str]) -> list[str]:
    if "HPC_TRAIN_HOSTS" in environ:  # a container has none of Slurm's programs
        return environ["HPC_TRAIN_HOSTS"].split()
    listed = environ.get("SLURM_JOB_NODELIST", "")
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SCONTROL_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return [listed] if listed else []
    return done.stdout.split()


def _num_ranks(environ: Mapping[str, str]) -> int | None:
    with suppress(ValueError, UsageError):
        if "SLURM_NTASKS" in environ:
            return int(environ["SLURM_NTASKS"])
        return sum(parse_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")))
    return None


def say(text: str) -> None:
    print(f"hpc-train: {text}", file=sys.stderr, flush=True)


def main(words: Iterable[str]) -> int:
    (folder,) = words
    try:
        line = begin(Path(folder).absolute(), os.environ)
    except UserError as error:
        say(str(error))
        return int(error.exit_code) or int(ExitCode.FAILED)
    if line is not None:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
