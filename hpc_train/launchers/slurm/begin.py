"""Called by the batch script before srun, on the first node: claims the attempt, prints its folder.

``python -m hpc_train.launchers.slurm.begin SUBMISSION`` prints attempt, token and run folder, tab-separated,
and with spare nodes the nodes for the ranks; nothing if the run must not start; the nodes to exclude, with
exit code 78, if it runs on one of them and requests another start. Errors are reported on stderr and by the
exit code.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, TryAgainError, UsageError, UserError
from hpc_train.launchers.notifications import notify_end
from hpc_train.launchers.slurm import ALLOCATION, LAUNCHER, batch_job, commands
from hpc_train.launchers.slurm.batch_job import IN_PLACE, NUM_NODES, BatchJob, say
from hpc_train.launchers.slurm.evidence import noted_stop
from hpc_train.paths import RunPaths
from hpc_train.rank.env import parse_tasks_per_node
from hpc_train.recovery import bad_nodes, budgets, history
from hpc_train.recovery.diagnosis import one_line
from hpc_train.run import attempts, stage_order, trust
from hpc_train.run.attempts import AttemptRecord, now, read_record, write_record
from hpc_train.run.code import snapshot
from hpc_train.run.liveness import SILENT_LIMIT_S, end_living, living, newest_record, silent_s
from hpc_train.run.processes import FOLDER_VARIABLE, Process
from hpc_train.run.run_status import RunStatus, read_status, run_facts, write_status
from hpc_train.run.storage_errors import FULL, storage_error

#: Maximum requeues per start to leave an excluded node; after that the job runs where it is.
_MOST_ASKED = 2
#: Maximum starts of a failed run's job, without progress, that hpc-train did not request. A user may requeue
#: the job; a Slurm that requeues automatically (RequeueExit) would do so without end.
_MOST_UNREQUESTED = 3
#: Seconds before the warning of the time limit in which a shared job begins no further run. Assumed.
_MIN_RUN_S = 60.0
#: States of a job whose ranks may still be on its nodes.
_HAS_PROCESSES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
#: Set by the batch script if Slurm can't exclude the nodes.
_ANY_NODE = "HPC_TRAIN_ANY_NODE"


class BudgetSpentError(UserError):
    """The run has failed: it is not requeued after the previous attempt."""

    exit_code = ExitCode.NO_RETRY


class WrongNodeError(UserError):
    """The job is on a node that the run excludes; ``nodes``: all excluded nodes."""

    exit_code = ExitCode.BAD_NODE

    def __init__(self, message: str, nodes: Iterable[str]) -> None:
        self.nodes = list(nodes)
        super().__init__(message)


def begin(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Claim the attempt; return the answer, or None if the run must not start.

    Raises TryAgainError if another attempt runs or a stage waits for another run, BudgetSpentError if no
    attempt may follow, WrongNodeError to request other nodes, UserError if others could have written its
    code, the disk is full or the run's folder is gone.
    """
    job = BatchJob.of(folder, environ)
    began = attempts.now_ms()
    if not job.paths.folder.is_dir():
        raise BadFileError(f"run {job.paths.folder.name}: {job.paths.folder} is gone; nothing to do")
    newest = attempts.job_ids(run_facts(job.paths))[-1:]
    if newest not in ([], [job.job]):  # it was started again, or its folder was removed and made again
        say(f"run {job.paths.folder.name} belongs to job {newest[0]}; job {job.job} has nothing to do")
        return None
    is_cancelled = job.paths.cancelled.exists()
    if is_cancelled or read_status(job.paths).state == "completed":
        state = "cancelled" if is_cancelled else "completed"
        say(f"run {job.paths.folder.name} is {state}; nothing to do")
        return None
    stage_order.check_may_begin(job.paths)
    _check_unrequested(job)
    try:
        with _full_disks(job.paths):
            _check_trusted(job)
            stage_order.note_weights(job.paths)
            number = _claimed(job, environ, began)
            status = read_status(job.paths)
            write_status(job.paths, replace(status, state="running", attempt=number, reason=None))
    except TryAgainError:
        raise
    except WrongNodeError as error:
        _write_status(job.paths, "requeued", str(error))
        raise
    except HpcTrainError as error:
        notify_end(job.paths, say, _write_status(job.paths, "failed", str(error)))
        raise
    mark = batch_job.MARK.removeprefix("hpc-train: ")
    say(f"{mark} {number} of run {job.paths.folder.name}, job {job.job}, {now()}")
    line = f"{number}\t{secrets.token_hex(16)}\t{job.paths.folder}"
    record = read_record(job.paths.attempt(number)) if NUM_NODES in environ else None
    return line if record is None else f"{line}\t{','.join(record.hosts)}"


def begin_next(jobs: Sequence[BatchJob], environ: Mapping[str, str]) -> str | None:
    """Begin the next run of a job that several share; return the answer, or None if no run is left.

    Each start of the job begins a run once; restarts in place follow in the same slot. A run that can't begin
    has its verdict, and the next one is begun.
    """
    is_in_place = IN_PLACE in environ
    for job in jobs:
        if is_in_place:
            if str(job.paths.folder) != environ.get(FOLDER_VARIABLE):
                continue
        elif _is_ending(jobs, environ):
            return None
        elif not job.is_unfinished or not job.claim():
            continue
        try:
            line = begin(job.submission.folder, {**environ, FOLDER_VARIABLE: str(job.paths.folder)})
        except UserError as error:
            say(str(error))
            job.note_verdict(f"stop {int(error.exit_code) or int(ExitCode.FAILED)}")
            continue
        if line is not None:
            return line
        job.note_verdict("stop 0")
    return None


def _is_ending(jobs: Sequence[BatchJob], environ: Mapping[str, str]) -> bool:
    """Return True if the job is being stopped, or has too little time left for one more run."""
    if jobs[0].stopping.exists():
        return True
    preempted_s = batch_job.job_time("PreemptTime", environ)
    if preempted_s is not None and preempted_s >= (batch_job.job_time("StartTime", environ) or 0.0):
        return True
    end_s = batch_job.job_time("EndTime", environ)
    if end_s is None or all(job.verdict is None for job in jobs):  # the first runs of a start begin always
        return False
    return end_s - time.time() < batch_job.warning_s(jobs[0].submission) + _MIN_RUN_S


@contextmanager
def _full_disks(paths: RunPaths) -> Iterator[None]:
    """Raise StorageError if the disk is full. Other disk errors may be specific to this node."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise storage_error(error, paths.folder) from error
        raise


def _write_status(paths: RunPaths, state: str, reason: str) -> RunStatus:
    status = replace(read_status(paths), state=state, reason=one_line(reason))
    with suppress(OSError):
        write_status(paths, status)
    return status


def _check_unrequested(job: BatchJob) -> None:
    """Raise BudgetSpentError if the job of a failed run is started again and again.

    The batch script chooses an exit code after which Slurm does not restart the job, but it may not have
    received the list of these codes. A start after a lost node, or one that ``after`` or the batch script
    requested, does not count.
    """
    record, status = newest_record(job.paths), read_status(job.paths)
    if status.state != "failed" or record is None or record.end is None or not job.owns(record):
        return
    if record.restart == job.restart or "requeue" in record.events or job.cannot_start.exists():
        return
    step = history.saved_step(job.paths, record.attempt)
    lines = job.unrequested.read_text().splitlines() if job.unrequested.exists() else []
    starts = 1 + sum(line.endswith(f" step {step}") for line in lines)
    run = job.paths.folder.name
    if starts > _MOST_UNREQUESTED:
        raise BudgetSpentError(
            f"run {run} has failed, and its job was started again {_MOST_UNREQUESTED} times without "
            f"progress, by Slurm (RequeueExit) or `scontrol requeue`; `hpc-train resume {run}` continues it"
        )
    say(f"run {run} had failed, but its job is started again: {starts} of {_MOST_UNREQUESTED} times")
    with job.unrequested.open("a") as file:
        file.write(f"{now()} step {step}\n")


def _check_trusted(job: BatchJob) -> None:
    """Raise UntrustedError if another user could have written the code of the ranks."""
    trust.check_run(job.paths)
    folder = job.submission.folder
    for path in [folder, *folder.glob("*.pkl")]:
        trust.check_own(path)
    code = snapshot.linked(job.paths)
    if code is not None:
        snapshot.check_owner(code)
        snapshot.check_whole(code)


def _claimed(job: BatchJob, environ: Mapping[str, str], began: str) -> int:
    """Return the number of this job's attempt: a new one, unless this batch script has claimed it before."""
    task = environ.get("SLURM_TASK_PID", "")  # the parent may be a container's starter
    script = Process.of(int(task)) if task.isdecimal() else None
    script = script or Process.of(os.getppid()) or Process.current()
    record, in_place = newest_record(job.paths), IN_PLACE in environ
    if record is not None and record.end is None:
        is_own = job.owns(record) and record.launcher_process == script
        if is_own and record.restart == job.restart and not in_place:
            return record.attempt
        _end_earlier(job, record, in_place=in_place and is_own)
    allocated = batch_job.allocated_hosts(environ)
    hosts = _checked_nodes(job, allocated, environ)
    job.asked.unlink(missing_ok=True)
    facts = batch_job.granted(job.submission, environ)
    if sentence := batch_job.limit_words(AttemptRecord(0, began, [], None, **facts)):
        say(sentence)
    return attempts.claim_attempt(
        job.paths,
        ALLOCATION if job.is_allocation else LAUNCHER,
        job=job.job,
        restart=job.restart,
        in_place=in_place,
        cluster=job.cluster,
        hosts=hosts,
        spare_hosts=[host for host in allocated if host not in hosts],
        ranks=_num_ranks(environ),
        events={"begin": began},
        launcher_process=script,
        **facts,
    )


def _end_earlier(job: BatchJob, record: AttemptRecord, *, in_place: bool) -> None:
    """Make sure that the previous attempt, which has no recorded end, is over. Raises TryAgainError."""
    is_own = in_place or (job.owns(record) and record.restart != job.restart)
    # An attempt that Slurm has requeued is over, though its processes may live on a lost node: they commit
    # nothing once this attempt is recorded.
    if not is_own and (living(record) or _is_running(job, record)):
        raise TryAgainError(
            f"attempt {record.attempt} of run {job.paths.folder.name} is running "
            f"({record.launcher or 'its launcher'} on {', '.join(record.hosts) or 'another machine'}); "
            "this job ends"
        )
    if not is_own:
        end_living(job.paths)
    diagnosed = _diagnosed(job, record, is_requeued=is_own or not job.owns(record))
    write_record(job.paths.attempt(record.attempt), diagnosed)
    if job.owns(record):
        _check_budget(job, diagnosed)


def _diagnosed(job: BatchJob, record: AttemptRecord, *, is_requeued: bool) -> AttemptRecord:
    """Return the record of an attempt that ended before its batch script could diagnose it."""
    paths = job.paths
    output = ""
    if job.owns(record):
        output = batch_job.output_of(job.submission.folder, job.job, record.attempt, paths.folder.name)
    diagnosis = history.diagnose_record(
        paths,
        record,
        step=read_status(paths).step,
        stop=noted_stop(attempts.noted_signal(paths.attempt(record.attempt)), output),
        dead_nodes=batch_job.gone_nodes(record.hosts),
        is_requeued=is_requeued,
    )
    return history.ended_unseen(paths, record, diagnosis)


def _check_budget(job: BatchJob, diagnosed: AttemptRecord) -> None:
    """Raise BudgetSpentError if no attempt may follow the lost one; else record the remaining budget."""
    attempt = job.paths.attempt(diagnosed.attempt)
    recovery = history.effective_recovery(job.paths, diagnosed.attempt)
    spent = batch_job.used_gpu_hours(job.paths, diagnosed)
    decision = budgets.decide([*job.earlier(diagnosed.attempt), diagnosed], recovery, spent)
    diagnosed = replace(diagnosed, reason=one_line(decision.reason))
    if decision.comes_back:
        write_record(attempt, diagnosed)
        return
    # Record this restart and an end by the batch script, so that `status` does not show the job as running.
    events = diagnosed.events | {"end": attempts.now_ms()}
    write_record(attempt, replace(diagnosed, restart=job.restart, events=events))
    raise BudgetSpentError(decision.reason)


def _checked_nodes(job: BatchJob, allocated: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the ranks' nodes. Raises WrongNodeError, a few times, if the run excludes one of them."""
    nodes = history.nodes_to_exclude(job.paths)
    hosts = allocated
    if NUM_NODES in environ:
        hosts, _ = batch_job.nodes_of_ranks(allocated, nodes, environ)
        if unused := sorted(set(allocated).intersection(nodes).difference(hosts)):
            say(f"{bad_nodes.exclusion_words({node: nodes[node] for node in unused})}; runs on the others")
    unwanted = sorted(set(hosts) & nodes.keys())
    if not unwanted or _ANY_NODE in environ:
        return hosts
    sentence = bad_nodes.exclusion_words({node: nodes[node] for node in unwanted})
    num_requests = len(job.asked.read_text().splitlines()) if job.asked.exists() else 0
    if num_requests >= _MOST_ASKED:
        say(f"{sentence}, but Slurm allocates no other; continuing there")
        return hosts
    with job.asked.open("a") as file:
        file.write(f"{now()} {' '.join(unwanted)}\n")
    raise WrongNodeError(f"asks for other nodes: {sentence}", nodes)


def _is_running(job: BatchJob, record: AttemptRecord) -> bool:
    """Return True if the job of another submission runs: by Slurm, or on another cluster by its heartbeat."""
    if record.launcher == ALLOCATION:  # the allocation outlives its runs
        return living(record) is None and silent_s(job.paths, record) < SILENT_LIMIT_S
    if record.launcher != LAUNCHER or record.job is None:
        return False
    if None not in {record.cluster, job.cluster} and record.cluster != job.cluster:
        return silent_s(job.paths, record) < SILENT_LIMIT_S
    with suppress(HpcTrainError):  # if Slurm does not answer, ownership protects the run
        listed = commands.run(["squeue", "--noheader", "--format=%T", f"--jobs={record.job}"])
        return not _HAS_PROCESSES.isdisjoint(listed.split())
    return False


def _num_ranks(environ: Mapping[str, str]) -> int | None:
    with suppress(ValueError, UsageError):
        if "SLURM_NTASKS" in environ:
            return int(environ["SLURM_NTASKS"])
        return sum(parse_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")))
    return None


def main(arguments: Iterable[str]) -> int:
    """Print the answer of ``begun``; return the exit code."""
    (folder,) = arguments
    code, line = begun(Path(folder).absolute())
    if line is not None:
        batch_job.answer(line)
    return code


def begun(submission: Path) -> tuple[int, str | None]:
    """Begin an attempt; return the exit code and the answer, or the nodes to exclude; None after an error."""
    try:
        jobs = BatchJob.with_each_run(submission, os.environ)
        if jobs[0].is_shared:
            line = begin_next(jobs, os.environ)
        else:
            line = begin(jobs[0].submission.folder, os.environ)
    except UserError as error:
        say(str(error))
        nodes = ",".join(error.nodes) if isinstance(error, WrongNodeError) else None
        return int(error.exit_code) or int(ExitCode.FAILED), nodes
    return 0, line or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
