"""Where a run stands: its folder's word, and Slurm's where the folder can't know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hpc_train.errors import NoSlurmError
from hpc_train.launchers.slurm.answers import MAX_AGE_S
from hpc_train.launchers.slurm.jobs import FORGOTTEN, JobState, ask
from hpc_train.launchers.slurm.waiting import waiting_words
from hpc_train.launchers.words import say
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.run_folder.attempts import AttemptRecord, now, write_record
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.finding import run_name
from hpc_train.run_folder.liveness import newest_record
from hpc_train.run_folder.status import GOING_ON, RunStatus, read_status, write_status

#: From a job's end to its verdict by us: the tear-down's own may still be on its way through a network
#: disk, and Slurm may be about to requeue what it calls ended. Assumed.
_GRACE = timedelta(seconds=5)
CUT_SHORT = "its submission was cut short; submit the file again"
_ENDING = "its job has just ended"

#: A job that ended without a verdict in the folder → how the run stands, why, and the attempt's cause.
_VERDICTS = {
    "CANCELLED": ("cancelled", "scancel", "cancelled"),
    "TIMEOUT": (
        "failed",
        "time limit reached before a save was done; raise slurm.signal_lead_s",
        "time limit",
    ),
    "DEADLINE": ("failed", "the job's deadline has passed", "time limit"),
    "PREEMPTED": ("failed", "preempted, and this site does not requeue what it preempts", "preemption"),
    "OUT_OF_MEMORY": ("failed", "out of memory; ask for more slurm.mem_gb, or fewer data.workers", "crash"),
    "NODE_FAIL": ("failed", "a node failed, and Slurm did not requeue the job", "lost"),
    "BOOT_FAIL": ("failed", "a node did not start", "lost"),
    FORGOTTEN: ("failed", "the job is gone, and Slurm has forgotten how it ended", "lost"),
}


@dataclass(frozen=True)
class Folder:
    """What a run folder says, read before Slurm is asked."""

    paths: RunPaths
    status: RunStatus
    #: The newest job's ``12_3`` or ``12``; None where none was ever submitted.
    job: str | None
    record: AttemptRecord | None
    is_cancelled: bool

    @classmethod
    def read(cls, paths: RunPaths) -> Folder:
        status, record = read_status(paths), newest_record(paths)
        return cls(paths, status, newest_job(paths, record), record, paths.cancelled.exists())

    def began_by(self, job: JobState) -> bool:
        """Tell whether the job as it is now, not as it was before a requeue, has begun the newest attempt."""
        return self._is_of(job) and not self.is_requeued(job)

    def is_requeued(self, job: JobState) -> bool:
        """Tell whether the newest attempt is the job's, which has been requeued since."""
        if not self._is_of(job):
            return False
        assert self.record is not None
        if job.restarts is None or self.record.restart is None:
            return job.is_waiting
        # An older answer counts fewer: it never takes a run that goes on for one that waits.
        return job.restarts > self.record.restart

    def _is_of(self, job: JobState) -> bool:
        return self.record is not None and self.record.slurm_job == job.job


def newest_job(paths: RunPaths, record: AttemptRecord | None) -> str | None:
    """Return the id of the job that has the run; ``record`` is of its newest attempt."""
    ids = (read_json(paths.run) or {}).get("slurm_job_ids") or []
    return str(ids[-1]) if ids else record.slurm_job if record is not None else None


def standings(runs: Sequence[RunPaths], *, max_age_s: float = MAX_AGE_S) -> list[RunStatus]:
    """Return where runs stand; ``status.json`` is corrected where Slurm knows of an end or a requeue.

    Where Slurm does not answer the folders' word is returned and that is said, once; with ``max_age_s`` 0,
    which insists, NoSlurmError is raised.
    """
    folders = [Folder.read(paths) for paths in runs]
    going_on = {folder.job for folder in folders if folder.job and folder.status.state in GOING_ON}
    jobs: dict[str, JobState] = {}
    if going_on or max_age_s == 0:
        try:
            jobs = ask(going_on, max_age_s=max_age_s)
        except NoSlurmError as error:
            if max_age_s == 0:
                raise
            say(f"{error}\n  what follows is what the run folders say")
    return [stand(folder, jobs.get(folder.job or "")) for folder in folders]


def stand(folder: Folder, job: JobState | None) -> RunStatus:
    """Return where one run stands; ``job``: None where Slurm can't tell of it."""
    status = folder.status
    if status.state not in GOING_ON:
        # Requeued by hand after its end: it will go on.
        return _requeued(folder, job) if job and _is_revived(folder, job) else status
    if folder.job is None:
        return end_cancelled(folder) if folder.is_cancelled else replace(status, reason=CUT_SHORT)
    if job is None:
        return status
    if job.is_over:
        return _over(folder, job)
    if folder.is_cancelled:
        return replace(status, reason="being cancelled")
    if folder.is_requeued(job):
        return _requeued(folder, job)
    if folder.began_by(job):
        is_stopped = job.state in {"SUSPENDED", "STOPPED"}
        return replace(status, reason=f"{job.state.lower()} by Slurm") if is_stopped else status
    return _not_begun(folder, job)


def _is_revived(folder: Folder, job: JobState) -> bool:
    is_final = folder.status.state == "completed" or folder.is_cancelled
    return not is_final and not job.is_over and folder.is_requeued(job)


def _not_begun(folder: Folder, job: JobState) -> RunStatus:
    """The job has not claimed an attempt yet."""
    status = folder.status
    if not job.is_waiting:
        reason = f"starting on {job.nodes}" if job.nodes else "starting"
    elif job.reason == "JobHeldUser" and not _is_released(folder):
        reason = "held until its submission is complete; submit the file again if that was cut short"
    else:
        reason = waiting_words(job)
    return replace(status, reason=reason)


def _is_released(folder: Folder) -> bool:
    found = submission_of(folder.paths, folder.job or "")
    record = read_json(found.record) if found else None
    return record is None or record.get("state") == "released"


def submission_of(paths: RunPaths, job: str) -> SubmissionPaths | None:
    """Return the submission that made the job."""
    number = job.partition("_")[0]
    for submission in paths.siblings.submission_folders():
        if str((read_json(submission.record) or {}).get("job_id")) == number:
            return submission
    return None


def batch_output(paths: RunPaths, job: str) -> Path | None:
    """Return the file into which the job's batch script prints, if there is one by now."""
    name = f"{job}_0_log.out"  # by submitit
    found = [
        path for folder in paths.siblings.submission_folders() if (path := folder.folder / name).is_file()
    ]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def _requeued(folder: Folder, job: JobState) -> RunStatus:
    status = folder.status
    if status.state != "requeued":
        status = _correct(folder, replace(status, state="requeued", reason=_requeue_reason(folder)))
    if status.state != "requeued":
        return status
    wait = waiting_words(job) if job.is_waiting else _on_its_way(job)
    return replace(status, reason="; ".join(filter(None, (status.reason, wait))))


def _on_its_way(job: JobState) -> str:
    if job.state == "COMPLETING":
        return "waits: its nodes are being cleared"
    return f"starting on {job.nodes}" if job.nodes else "starting"


def _requeue_reason(folder: Folder) -> str:
    """Return why, where the batch script had no say: its record knows, or nobody does."""
    if folder.status.state not in GOING_ON:
        return f"requeued by hand after {folder.status.reason or folder.status.state}"
    record = folder.record
    cause = record.cause if record else None
    if record is not None and cause is None and "saved" in record.events:
        return f"preempted, or requeued by hand, at step {folder.status.step}"
    known = {"preemption": "preempted", "time limit": "time limit"}
    return f"{known.get(cause or '', 'ended by Slurm without a word')} at step {folder.status.step}"


def _over(folder: Folder, job: JobState) -> RunStatus:
    """The job is gone, and the folder holds no end yet."""
    if _has_just_ended(job):
        return replace(folder.status, reason=folder.status.reason or f"{_ENDING}: {job.state}")
    if folder.is_cancelled:
        return end_cancelled(folder)
    state, reason, cause = _verdict(folder, job)
    return _end(folder, replace(folder.status, state=state, reason=reason), cause)


def end_cancelled(folder: Folder) -> RunStatus:
    """Write down that the run was cancelled and its job is gone."""
    return _end(folder, replace(folder.status, state="cancelled", reason="hpc-train cancel"), "cancelled")


def _has_just_ended(job: JobState) -> bool:
    if job.ended is None:
        return False
    return timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(job.ended) < _GRACE


def _verdict(folder: Folder, job: JobState) -> tuple[str, str, str]:
    is_unseen = job.state == FORGOTTEN and not folder.began_by(job) and folder.status.state == "pending"
    if is_unseen and batch_output(folder.paths, job.job) is not None:
        reason = f"job {job.job} ended before any rank started; see `hpc-train logs {run_name(folder.paths)}`"
        return "failed", reason, "lost"
    if is_unseen:
        # A task cancelled while its array waits leaves no trace, not even with accounting (22.05).
        return "cancelled", f"job {job.job} left the queue before it started: scancel", "cancelled"
    if job.state in _VERDICTS:
        state, reason, cause = _VERDICTS[job.state]
        return state, reason if state == "cancelled" else f"job {job.job}: {reason}", cause
    code = f", exit code {job.exit_code.partition(':')[0]}" if job.exit_code else ""
    if folder.status.state == "requeued":
        what = f"job {job.job} was to be requeued but ended ({job.state}{code})"
        return "failed", f"{what}; see `hpc-train logs {run_name(folder.paths)}`", "lost"
    if folder.began_by(job):
        what = f"job {job.job} ended without a word ({job.state}{code})"
    else:
        what = f"job {job.job} ended before any rank started ({job.reason or job.state}{code})"
    return "failed", f"{what}; see `hpc-train logs {run_name(folder.paths)}`", "lost"


def _end(folder: Folder, status: RunStatus, cause: str) -> RunStatus:
    corrected = _correct(folder, status)
    record = folder.record
    if corrected is status and record is not None and record.end is None and record.slurm_job == folder.job:
        ended = replace(record, end=now(), reason=status.reason, cause=record.cause or cause)
        with suppress(OSError):
            write_record(folder.paths.attempt(record.attempt), ended)
    return corrected


def _correct(folder: Folder, status: RunStatus) -> RunStatus:
    """Write ``status`` unless the folder has come to say something else meanwhile; return what holds."""
    latest = read_status(folder.paths)
    if (latest.state, latest.attempt) != (folder.status.state, folder.status.attempt):
        return latest
    with suppress(OSError):  # somebody else's run, or a full disk: say it all the same
        write_status(folder.paths, status)
    return status
