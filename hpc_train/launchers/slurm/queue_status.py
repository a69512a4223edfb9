"""The status of a run: from its folder, and from Slurm where the folder can't know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import ExitCode, NoSchedulerError
from hpc_train.launchers.slurm.evidence import MORE_MEMORY, stop_by
from hpc_train.launchers.slurm.pending_reasons import waiting_words
from hpc_train.launchers.slurm.queue import FORGOTTEN, JobState, ask
from hpc_train.launchers.slurm.queue_cache import MAX_AGE_S
from hpc_train.launchers.slurm.submission import RELEASED
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.recovery.diagnosis import (
    LESS_MEMORY,
    Diagnosis,
    JobEnd,
    Stop,
    diagnose_job,
    diagnose_unexplained_job,
    stop_reason,
)
from hpc_train.recovery.history import diagnose_record, saved_step
from hpc_train.run.attempts import AttemptRecord, job_ids, newest_number, now, write_record
from hpc_train.run.events import noted_signal
from hpc_train.run.files import read_json
from hpc_train.run.find import run_name
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_facts import run_facts
from hpc_train.run.run_status import CANCELLED_BY, GOING_ON, RunStatus, read_status, write_status

#: From a job's end to its verdict by us: the tear-down's own may still be on its way through a network
#: disk, and Slurm may be about to requeue what it calls ended. Assumed.
_GRACE = timedelta(seconds=5)
#: What Slurm reports as the signal that ended a batch script whose output file could not be opened (22.05).
_NO_OUTPUT_FILE = "53"
CUT_SHORT = "its submission was cut short; submit the file again"
_ENDING = "its job has just ended"

#: TIMEOUT of ranks that saved: late, or at the limit, since a warning during the set-up reaches no rank.
_SAVED_TOO_LATE = "TIMEOUT after a save"
#: Slurm's state of a job that ended without a diagnosis in the folder → how it ended, and a remedy.
_JOB_ENDS: dict[str, tuple[JobEnd, str | None]] = {
    "TIMEOUT": (JobEnd.TIME_LIMIT, "raise slurm.signal_lead_s"),
    _SAVED_TOO_LATE: (JobEnd.SAVED_TOO_LATE, "raise slurm.signal_lead_s or slurm.time_limit"),
    "DEADLINE": (JobEnd.DEADLINE, None),
    "PREEMPTED": (JobEnd.PREEMPTED, None),
    "OUT_OF_MEMORY": (JobEnd.OUT_OF_MEMORY, f"{MORE_MEMORY}; {LESS_MEMORY}"),
    "NODE_FAIL": (JobEnd.NODE_FAILED, None),
    "BOOT_FAIL": (JobEnd.NODE_NOT_STARTED, None),
    FORGOTTEN: (JobEnd.FORGOTTEN, None),
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
        """Read the run's files; Slurm is not asked."""
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
        return self.record is not None and self.record.job == job.job


def newest_job(paths: RunPaths, record: AttemptRecord | None) -> str | None:
    """Return the id of the job that has the run; ``record`` is of its newest attempt."""
    ids = job_ids(run_facts(paths))
    return ids[-1] if ids else record.job if record is not None else None


def statuses(runs: Sequence[RunPaths], *, max_age_s: float = MAX_AGE_S) -> list[RunStatus]:
    """Return the status of runs; ``status.json`` is corrected where Slurm knows of an end or a requeue.

    Where Slurm does not answer the folders' word is returned and that is said, once; with ``max_age_s`` 0,
    which insists, NoSchedulerError is raised.
    """
    folders = [Folder.read(paths) for paths in runs]
    going_on = {folder.job for folder in folders if folder.job and folder.status.state in GOING_ON}
    jobs: dict[str, JobState] = {}
    if going_on or max_age_s == 0:
        try:
            jobs = ask(going_on, max_age_s=max_age_s)
        except NoSchedulerError as error:
            if max_age_s == 0:
                raise
            say(f"{error}\n  what follows is what the run folders say")
    submissions = Submissions()
    return [status_of(folder, jobs.get(folder.job or ""), submissions) for folder in folders]


def status_of(folder: Folder, job: JobState | None, submissions: Submissions | None = None) -> RunStatus:
    """Return the status of one run; ``job``: None where Slurm can't tell of it."""
    status, submissions = folder.status, submissions or Submissions()
    if status.state not in GOING_ON:
        # Requeued by hand after its end: it will go on.
        return _requeued(folder, job) if job and _is_revived(folder, job) else status
    if folder.job is None:
        return end_cancelled(folder) if folder.is_cancelled else replace(status, reason=CUT_SHORT)
    if job is None:
        return status
    if job.is_over:
        return _over(folder, job, submissions)
    if folder.is_cancelled:
        return replace(status, reason="being cancelled")
    if folder.is_requeued(job):
        return _requeued(folder, job)
    if folder.began_by(job):
        is_stopped = job.state in {"SUSPENDED", "STOPPED"}
        return replace(status, reason=f"{job.state.lower()} by Slurm") if is_stopped else status
    return _not_begun(folder, job, submissions)


def _is_revived(folder: Folder, job: JobState) -> bool:
    is_final = folder.status.state == "completed" or folder.is_cancelled
    return not is_final and not job.is_over and folder.is_requeued(job)


def _not_begun(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    """The job has not claimed an attempt yet."""
    status = folder.status
    if not job.is_waiting:
        reason = f"starting on {job.nodes}" if job.nodes else "starting"
    elif job.reason == "JobHeldUser" and not submissions.are_released(folder.paths, job.job):
        reason = "held until its submission is complete; submit the file again if that was cut short"
    else:
        reason = waiting_words(job)
    return replace(status, reason=reason)


class Submissions:
    """The submissions of experiments by the number of their job; each record is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, list[tuple[SubmissionPaths, str]]]] = {}

    def are_released(self, paths: RunPaths, job: str) -> bool:
        """Tell whether the submission that made the job is complete, or unknown."""
        return all(state == RELEASED for _, state in self._of(paths, job)[:1])

    def batch_output(self, paths: RunPaths, job: str) -> Path | None:
        """Return the file into which the job's batch script prints, if there is one yet."""
        name = f"{job}_0_log.out"  # by submitit
        outputs = (submission.folder / name for submission, _ in self._of(paths, job))
        # Several, where Slurm has begun to count its jobs again.
        found = [path for path in outputs if path.is_file()]
        return max(found, key=lambda path: path.stat().st_mtime) if found else None

    def _of(self, paths: RunPaths, job: str) -> list[tuple[SubmissionPaths, str]]:
        """Return the submissions that made the job, with their states."""
        folder = paths.siblings
        if folder.folder not in self._known:
            by_job = self._known.setdefault(folder.folder, {})
            for submission in folder.submission_folders():
                record = read_json(submission.record) or {}
                made = (submission, str(record.get("state")))
                by_job.setdefault(str(record.get("job_id")), []).append(made)
        return self._known[folder.folder].get(job.partition("_")[0], [])


def output_without_logs(paths: RunPaths) -> Path | None:
    """Return what the newest job's batch script printed, where no rank of it wrote anything; say so."""
    record = newest_record(paths)
    job = newest_job(paths, record)
    has_logs = paths.attempt(newest_number(paths)).files_of_ranks(".log")
    if job is None or (record is not None and record.job == job and has_logs):
        return None
    output = Submissions().batch_output(paths, job)
    if output is not None:
        say(f"{run_name(paths)}: no rank of job {job} has started; its batch script printed:")
    return output


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
    """Return why, where the batch script had no say: its record knows, or what its ranks have left."""
    if folder.status.state not in GOING_ON:
        return f"requeued by hand after {folder.status.reason or folder.status.state}"
    record = folder.record
    assert record is not None, "its job has begun it"
    if record.cause is not None:
        return record.reason or stop_reason(Stop(record.cause), folder.status.step)
    signal = noted_signal(folder.paths.attempt(record.attempt))
    stop = stop_by(signal) if signal else None
    return str(diagnose_record(folder.paths, record, step=folder.status.step, stop=stop).reason)


def _over(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    """The job is gone, and the folder holds no end yet."""
    if _has_just_ended(job):
        return replace(folder.status, reason=folder.status.reason or f"{_ENDING}: {job.state}")
    if folder.is_cancelled:
        return end_cancelled(folder)
    found = _diagnosed(folder, job, submissions)
    state = "cancelled" if found.cause == "cancelled" else "failed"
    return _end(folder, replace(folder.status, state=state, reason=found.reason), found.cause)


def end_cancelled(folder: Folder) -> RunStatus:
    """Write down that the run was cancelled and its job is gone."""
    # Ranks of a cancelled run no longer write status.json, but save before they end.
    step = max(folder.status.step, saved_step(folder.paths, newest_number(folder.paths)))
    status = replace(folder.status, state="cancelled", step=step, reason=CANCELLED_BY)
    return _end(folder, status, "cancelled")


def _has_just_ended(job: JobState) -> bool:
    if job.ended is None:
        return False
    return timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(job.ended) < _GRACE


def _diagnosed(folder: Folder, job: JobState, submissions: Submissions) -> Diagnosis:
    see = f"`hpc-train logs {run_name(folder.paths)}`"
    has_begun = folder.began_by(job)
    if job.state == FORGOTTEN and not has_begun and folder.status.state == "pending":
        if submissions.batch_output(folder.paths, job.job) is not None:
            return diagnose_unexplained_job(job.job, "", has_begun=False, was_requeued=False, see=see)
        # A task cancelled while its array waits leaves no trace, not even with accounting (22.05).
        return Diagnosis("cancelled", f"job {job.job} left the queue before it started: scancel")
    if job.state == "CANCELLED":
        return Diagnosis("cancelled", "scancel")
    has_saved = has_begun and folder.record is not None and "saved" in folder.record.events
    state = _SAVED_TOO_LATE if job.state == "TIMEOUT" and has_saved else job.state
    if state in _JOB_ENDS:
        end, remedy = _JOB_ENDS[state]
        return diagnose_job(job.job, end, "Slurm", remedy)
    code, _, signal = (job.exit_code or "").partition(":")
    if signal == _NO_OUTPUT_FILE:
        where = f"{job.nodes or 'a node'} can't write into {folder.paths.siblings.submissions}"
        return Diagnosis("lost", f"job {job.job}: {where}; nodes must see the folder of runs at this path")
    was_requeued = folder.status.state == "requeued"
    what = job.state if has_begun or was_requeued else job.reason or job.state
    how = f"({what}{_exit_words(code, signal)})"
    return diagnose_unexplained_job(job.job, how, has_begun=has_begun, was_requeued=was_requeued, see=see)


def _exit_words(code: str, signal: str) -> str:
    """Return how a batch script ended, to follow other words."""
    if signal not in {"", "0"}:
        return f", signal {signal}"
    reason = ": its disk is full, or can't be written" if code == str(int(ExitCode.IO)) else ""
    return f", exit code {code}{reason}" if code else ""


def _end(folder: Folder, status: RunStatus, cause: str) -> RunStatus:
    corrected = _correct(folder, status)
    record = folder.record
    if corrected is status and record is not None and record.end is None and record.job == folder.job:
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
