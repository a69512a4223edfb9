"""The status of a run: from its folder, and from Slurm for facts that the folder lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.console import say
from hpc_train.errors import ExitCode, NoSchedulerError
from hpc_train.launchers.base import Ranks
from hpc_train.launchers.slurm import evaluations, queue
from hpc_train.launchers.slurm.batch_job import limit_words, output_of
from hpc_train.launchers.slurm.commands import MAX_AGE_S, cluster_name
from hpc_train.launchers.slurm.evidence import MORE_MEMORY, noted_stop
from hpc_train.launchers.slurm.queue import ELSEWHERE, FORGOTTEN, REVOKED, JobKey, JobState
from hpc_train.launchers.slurm.submission import Submissions
from hpc_train.paths import RunPaths
from hpc_train.recovery.diagnosis import LESS_MEMORY, Diagnosis, Stop, diagnose_unexplained_job, stop_reason
from hpc_train.recovery.history import diagnose_record, saved_step
from hpc_train.run import attempts, evaluation_jobs
from hpc_train.run.attempts import AttemptRecord, newest_number
from hpc_train.run.find import run_name
from hpc_train.run.liveness import newest_record, silent_s
from hpc_train.run.run_status import CANCELLED_BY, GOING_ON, RunStatus, read_status, run_facts, write_status
from hpc_train.run.stage_order import waiting_words as stage_words

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job
    from hpc_train.experiment.plan.devices import Device

#: The signal that Slurm reports for a batch script whose output file could not be opened (22.05).
_NO_OUTPUT_FILE = "53"
CUT_SHORT = "its submission was cut short; submit the file again"
_ENDING = "its job has just ended"
#: Four heartbeats: an attempt that wrote something since then is running, whatever Slurm's answer lacks.
_ALIVE_S = 120.0

#: TIMEOUT of ranks that saved: late, or at the limit, since a warning during the set-up reaches no rank.
_SAVED_TOO_LATE = "TIMEOUT after a save"
#: TIMEOUT before the first step.
_NO_STEP = "TIMEOUT before a step"
_TOO_LATE = (
    "time limit reached: its ranks saved, but too late to be requeued; raise slurm.signal_lead_s or "
    "slurm.time_limit"
)
#: Slurm's state of a job that ended without a diagnosis in the folder → cause and reason.
_JOB_ENDS = {
    "TIMEOUT": ("time limit", "time limit reached before a save was done; raise slurm.signal_lead_s"),
    _SAVED_TOO_LATE: ("time limit", _TOO_LATE),
    _NO_STEP: ("time limit", "time limit reached before the first step; raise slurm.time_limit"),
    "DEADLINE": ("time limit", "the job's deadline has passed"),
    "PREEMPTED": ("preemption", "preempted, and this site does not requeue what it preempts"),
    "OUT_OF_MEMORY": ("crash", f"out of memory; {MORE_MEMORY}; {LESS_MEMORY}"),
    "NODE_FAIL": ("lost", "a node failed, and Slurm did not requeue the job"),
    "BOOT_FAIL": ("lost", "a node did not start"),
    FORGOTTEN: ("lost", "the job is gone, and Slurm has forgotten how it ended"),
}


@dataclass(frozen=True)
class Folder:
    """The content of a run folder, read before Slurm is queried."""

    paths: RunPaths
    status: RunStatus
    #: The newest job's ``12_3`` or ``12``; None if none was ever submitted.
    job: str | None
    record: AttemptRecord | None
    is_cancelled: bool
    #: The job's cluster; None: not recorded (0.2).
    cluster: str | None = None

    @classmethod
    def read(cls, paths: RunPaths) -> Folder:
        """Read the run's files; Slurm is not queried."""
        status, record = read_status(paths), newest_record(paths)
        key = newest_key(paths, record)
        job, cluster = key or (None, None)
        return cls(paths, status, job, record, paths.cancelled.exists(), cluster)

    @property
    def key(self) -> JobKey | None:
        """The newest job's id and cluster."""
        return None if self.job is None else (self.job, self.cluster)

    @property
    def may_return(self) -> bool:
        """Whether the run's end was only inferred: it is withdrawn if Slurm lists the job again."""
        if self.status.state not in {"failed", "cancelled"} or self.is_cancelled or self.job is None:
            return False
        record = self.record
        if record is None or not self._is_newest_job(record):
            return True
        return record.end is not None and "end" not in record.events and record.exit_codes is None

    def began_by(self, job: JobState) -> bool:
        """Return True if the job, since its last requeue, has begun the newest attempt."""
        return self._is_of(job) and not self.is_requeued(job)

    def is_requeued(self, job: JobState) -> bool:
        """Return True if the job ran the newest attempt and has been requeued since."""
        if not self._is_of(job):
            return False
        assert self.record is not None
        if job.restarts is None or self.record.restart is None:
            return job.is_waiting
        # An older answer has fewer restarts, so a running run is never taken for a waiting one.
        return job.restarts > self.record.restart

    def _is_of(self, job: JobState) -> bool:
        return self.record is not None and job.job == self.job and self._is_newest_job(self.record)

    def _is_newest_job(self, record: AttemptRecord) -> bool:
        is_same_cluster = None in {record.cluster, self.cluster} or record.cluster == self.cluster
        return record.job == self.job and is_same_cluster

    def is_silent(self) -> bool:
        """Return True unless the job's attempt has lately written any of its files."""
        record = self.record
        if record is None or record.end is not None or not self._is_newest_job(record):
            return True
        return silent_s(self.paths, record) > _ALIVE_S


def newest_key(paths: RunPaths, record: AttemptRecord | None) -> JobKey | None:
    """Return id and cluster of the run's newest job; ``record`` is of its newest attempt."""
    facts = run_facts(paths)
    if ids := attempts.job_ids(facts):
        return ids[-1], attempts.job_cluster(facts)
    return None if record is None or record.job is None else (record.job, record.cluster)


def other_cluster(paths: RunPaths) -> str | None:
    """Return the cluster of the active run's job if another cluster is reached from here, else None."""
    folder = Folder.read(paths)
    if folder.cluster is None or folder.status.state not in GOING_ON:
        return None
    return folder.cluster if cluster_name() not in {folder.cluster, None} else None


def statuses(runs: Sequence[RunPaths], *, max_age_s: float = MAX_AGE_S) -> list[RunStatus]:
    """Return the status of runs; ``status.json`` is corrected if Slurm reports an end or a requeue.

    An evaluation whose job has ended without a result is recorded as failed once the run has ended, too.

    If Slurm does not answer, the folders' status is returned and this is printed, once; with ``max_age_s`` 0
    NoSchedulerError is raised.
    """
    folders = [Folder.read(paths) for paths in runs]
    evaluating = [
        (folder.paths, step, (evaluation_jobs.job_ids(folder.paths, step)[-1], folder.cluster))
        for folder in folders
        if folder.status.state not in GOING_ON
        for step in evaluation_jobs.submitted(folder.paths)
    ]
    going_on = {folder.key for folder in folders if folder.key and folder.status.state in GOING_ON}
    going_on |= {key for _, _, key in evaluating}
    ended = {folder.key for folder in folders if folder.key} - going_on
    jobs: dict[JobKey, JobState] = {}
    if going_on or max_age_s == 0 or any(folder.may_return for folder in folders):
        try:
            jobs = queue.ask(going_on, also=ended, max_age_s=max_age_s)
        except NoSchedulerError as error:
            if max_age_s == 0:
                raise
            if going_on:
                say(str(error), "  what follows is what the run folders say")
    for paths, step, key in evaluating:
        evaluations.note_end(paths, step, jobs.get(key))
    submissions = Submissions()
    return [status_of(folder, jobs.get(folder.key or ("", None)), submissions) for folder in folders]


def status_of(folder: Folder, job: JobState | None, submissions: Submissions | None = None) -> RunStatus:
    """Return the status of one run; ``job``: None if its state is unknown."""
    status, submissions = folder.status, submissions or Submissions()
    if folder.job is None and status.state in GOING_ON:
        return end_cancelled(folder) if folder.is_cancelled else replace(status, reason=CUT_SHORT)
    if status.state == "pending" and not folder.is_cancelled and (reason := stage_words(folder.paths)):
        return replace(status, reason=reason)
    if job is not None and not submissions.made(folder.paths, job):
        job = JobState(job.job, FORGOTTEN)  # Slurm has given its number to another job
    if job is not None and job.state == ELSEWHERE and status.state in GOING_ON:
        text = f"job {job.job} belongs to cluster {folder.cluster}, this is {job.reason}"
        return replace(status, reason=text)
    if job is None or job.state == ELSEWHERE:
        return status
    if status.state not in GOING_ON:
        return status if job.is_over or job.state == REVOKED else _returned(folder, job, submissions)
    if job.is_over:
        return _over(folder, job, submissions)
    if folder.is_cancelled:
        return replace(status, reason="being cancelled")
    if job.state == REVOKED:
        return replace(status, reason=f"job {job.job} has started on another cluster of the federation")
    if folder.is_requeued(job):
        return _requeued(folder, job, submissions)
    if folder.began_by(job) and folder.record is not None:
        reason = _stopped(job) or limit_words(folder.record)
        if status.state == "requeued" and submissions.neighbors(folder.paths, job.job):
            wait = f"job {job.job} is requeued once its other runs have ended"
            reason = "; ".join(filter(None, (status.reason, reason, wait)))
        return replace(status, reason=reason) if reason else status
    return _not_begun(folder, job, submissions)


def _returned(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    """Return the status of a run that has ended according to its folder, while Slurm has its job.

    The job was requeued manually, or an end that was only inferred from its absence is withdrawn.
    """
    status, record = folder.status, folder.record
    if status.state == "completed" or folder.is_cancelled:
        return status
    # A shared job is requeued for its other runs; it does not begin a failed run again.
    if submissions.neighbors(folder.paths, job.job) and (folder.record is None or not folder.may_return):
        return status
    if folder.is_requeued(job):
        return _requeued(folder, job, submissions)
    if not folder.may_return:
        return status
    if folder.began_by(job):
        assert record is not None, "its job has begun it"
        if job.state not in queue.RUNNING:
            return status
        status = _correct(folder, replace(status, state="running", reason=None))
        with suppress(OSError):
            alive = replace(record, end=None, reason=None, cause=None, saved_step=None)
            attempts.write_record(folder.paths.attempt(record.attempt), alive)
        return status
    if not job.is_waiting:
        return status
    has_run = record is not None and record.cause is not None and folder._is_newest_job(record)
    state = "requeued" if has_run else "pending"
    status = _correct(folder, replace(status, state=state, reason=None))
    return _not_begun(replace(folder, status=status), job, submissions)


def _not_begun(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    status = folder.status
    if not job.is_waiting:
        reason = _starting(folder, job, submissions)
    elif job.reason == "JobHeldUser" and not submissions.are_released(folder.paths, job.job):
        reason = "held until its submission is complete; submit the file again if that was cut short"
    else:
        reason = queue.waiting_words(job)
    return replace(status, reason=reason)


def _stopped(job: JobState) -> str | None:
    return f"{job.state.lower()} by Slurm" if job.state in {"SUSPENDED", "STOPPED"} else None


def _starting(folder: Folder, job: JobState, submissions: Submissions) -> str:
    if submissions.neighbors(folder.paths, job.job):
        return f"waits for a slot of job {job.job}"
    if stopped := _stopped(job):
        return stopped
    return f"starting on {job.nodes}" if job.nodes else "starting"


def output_without_logs(paths: RunPaths) -> Path | None:
    """Return the batch script's output file of the newest job, with a note, if no rank has a log."""
    record = newest_record(paths)
    job, _ = newest_key(paths, record) or (None, None)
    has_logs = paths.attempt(newest_number(paths)).files_of_ranks(".log")
    if job is None or (record is not None and record.job == job and has_logs):
        return None
    output = Submissions().batch_output(paths, job)
    if output is not None:
        say(f"{run_name(paths)}: no rank of job {job} has started; its batch script printed:")
    return output


def _requeued(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    status = folder.status
    if status.state != "requeued":
        reason = _requeue_reason(folder, submissions)
        status = _correct(folder, replace(status, state="requeued", reason=reason))
    if status.state != "requeued":
        return status
    if job.is_waiting:
        wait = queue.waiting_words(job)
    elif job.state == "COMPLETING":
        wait = "waits: its nodes are being cleared"
    else:
        wait = _starting(folder, job, submissions)
    return replace(status, reason="; ".join(filter(None, (status.reason, wait))))


def _requeue_reason(folder: Folder, submissions: Submissions) -> str:
    """Return the reason that the batch script could not record: by the record, or the ranks' files."""
    if folder.status.state not in GOING_ON:
        return f"requeued by hand after {folder.status.reason or folder.status.state}"
    record = folder.record
    assert record is not None, "its job has begun it"
    if record.cause is not None:
        return record.reason or stop_reason(Stop(record.cause), folder.status.step)
    signal = attempts.noted_signal(folder.paths.attempt(record.attempt))
    file = submissions.batch_output(folder.paths, str(record.job))
    output = ""
    if file is not None:
        output = output_of(file.parent, str(record.job), record.attempt, folder.paths.folder.name)
    stop = noted_stop(signal, output)
    return str(diagnose_record(folder.paths, record, step=folder.status.step, stop=stop).reason)


def _over(folder: Folder, job: JobState, submissions: Submissions) -> RunStatus:
    """Return the status of a run whose job has ended or is unknown, if the folder has no end yet."""
    if job.missed_at is not None and not folder.is_cancelled and (job.may_reappear or not folder.is_silent()):
        text = (
            f"Slurm does not list job {job.job} now; if it is still missing in a minute, it counts as ended"
        )
        return replace(folder.status, reason="; ".join(filter(None, (folder.status.reason, text))))
    if job.has_just_ended:
        return replace(folder.status, reason=folder.status.reason or f"{_ENDING}: {job.state}")
    if folder.is_cancelled:
        return end_cancelled(folder)
    diagnosis = _diagnosed(folder, job, submissions)
    state = "cancelled" if diagnosis.cause == "cancelled" else "failed"
    return _end(folder, replace(folder.status, state=state, reason=diagnosis.reason), diagnosis.cause)


def end_cancelled(folder: Folder) -> RunStatus:
    """Write down that the run was cancelled and its job is gone."""
    # Ranks of a cancelled run no longer write status.json, but save before they end.
    step = max(folder.status.step, saved_step(folder.paths, newest_number(folder.paths)))
    status = replace(folder.status, state="cancelled", step=step, reason=CANCELLED_BY)
    return _end(folder, status, "cancelled")


def _diagnosed(folder: Folder, job: JobState, submissions: Submissions) -> Diagnosis:
    see = f"`hpc-train logs {run_name(folder.paths)}`"
    has_begun = folder.began_by(job)
    if job.state == FORGOTTEN and not has_begun and folder.status.state == "pending":
        if submissions.batch_output(folder.paths, job.job) is not None:
            return diagnose_unexplained_job(job.job, "", has_begun=False, was_requeued=False, see=see)
        # A task cancelled while its array waits leaves no trace, not even with accounting (22.05).
        return Diagnosis("cancelled", f"job {job.job} left the queue before it started: scancel")
    if job.state == "CANCELLED":
        return Diagnosis("cancelled", _cancelled_by(job))
    has_saved = has_begun and folder.record is not None and "saved" in folder.record.events
    state = _SAVED_TOO_LATE if job.state == "TIMEOUT" and has_saved else job.state
    events = folder.record.events if has_begun and folder.record is not None else {}
    if state == "TIMEOUT" and folder.status.step == 0 and "first_step" not in events:
        state = _NO_STEP
    if state in _JOB_ENDS:
        cause, reason = _JOB_ENDS[state]
        if has_begun and cause == "time limit" and folder.record is not None:
            reason = "; ".join(filter(None, (reason, limit_words(folder.record))))
        return Diagnosis(cause, f"job {job.job}: {reason}")
    code, _, signal = (job.exit_code or "").partition(":")
    if signal == _NO_OUTPUT_FILE:
        where = f"{job.nodes or 'a node'} can't write into {folder.paths.siblings.submissions}"
        return Diagnosis("lost", f"job {job.job}: {where}; nodes must see the folder of runs at this path")
    was_requeued = folder.status.state == "requeued"
    state_text = job.state if has_begun or was_requeued else job.reason or job.state
    how = f"({state_text}{_exit_words(code, signal)})"
    return diagnose_unexplained_job(job.job, how, has_begun=has_begun, was_requeued=was_requeued, see=see)


def _cancelled_by(job: JobState) -> str:
    """Return who has cancelled the job, as far as Slurm says so."""
    if job.reason == "DependencyNeverSatisfied":
        return f"by Slurm: the job that job {job.job} waits for failed or was cancelled"
    user = (job.reason or "").removeprefix("by ")
    return f"scancel by user {user}" if user.isdecimal() and int(user) != os.getuid() else "scancel"


def _exit_words(code: str, signal: str) -> str:
    if signal not in {"", "0"}:
        return f", signal {signal}"
    reason = ": its disk is full, or can't be written" if code == str(int(ExitCode.IO)) else ""
    return f", exit code {code}{reason}" if code else ""


def _end(folder: Folder, status: RunStatus, cause: str) -> RunStatus:
    corrected = _correct(folder, status)
    record = folder.record
    if corrected is status and record is not None and record.end is None and record.job == folder.job:
        ended = replace(record, end=attempts.now(), reason=status.reason, cause=record.cause or cause)
        with suppress(OSError):
            attempts.write_record(folder.paths.attempt(record.attempt), ended)
    return corrected


def _correct(folder: Folder, status: RunStatus) -> RunStatus:
    """Write ``status`` unless the folder's status has changed meanwhile; return the valid one."""
    latest = read_status(folder.paths)
    if (latest.state, latest.attempt) != (folder.status.state, folder.status.attempt):
        return latest
    with suppress(OSError):  # another user's run, or a full disk: return it nevertheless
        write_status(folder.paths, status)
    return status


class SlurmBase:
    """The methods that are equal for jobs of ``submit`` and of ``--here``."""

    def choose_devices(self, experiment: Job, devices: int | None) -> int | None:
        """Return None: the section ``slurm``, or the allocation, gives the number of ranks."""
        return None

    def device(self, experiment: Job, size: Ranks) -> Device | None:
        """Return the GPU, or on CPUs the memory per rank, that ``slurm`` requests; None without it."""
        from hpc_train.launchers.slurm import options
        from hpc_train.launchers.slurm.profiles import slurm_of

        slurm = slurm_of(experiment)
        return None if slurm is None else options.device_of_job(slurm, experiment.device, size)

    def output(self, paths: RunPaths) -> Path | None:
        """Return the newest job's batch script output, with a note, if no rank has written a log."""
        return output_without_logs(paths)
