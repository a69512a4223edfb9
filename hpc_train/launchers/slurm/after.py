"""Called by the batch script after srun, on the first node: diagnoses the attempt, decides about a requeue.

``python -m hpc_train.launchers.slurm.after SUBMISSION CODE`` (srun's exit code) records the diagnosis and
prints ``requeue 75 [NODES]`` (nodes to exclude), ``stop CODE`` or ``again``; the script executes it, since
Slurm can't be reached from a container. After ``again`` follow code and answer of ``begin``, which is called
in this process: another one would cost a restart in place the time of its imports. ``after SUBMISSION refused
WORDS`` records that Slurm refused the requeue. ``after SUBMISSION slots CODE`` prints the verdict on a job
that several runs share, from theirs. CODE: 0, or of a slot that could not begin a run.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, UserError, listed
from hpc_train.experiment.topology.batch_arithmetic import DEFAULT_SAVE_EVERY_MIN
from hpc_train.launchers.notifications import notify_end
from hpc_train.launchers.outcome import telling_line
from hpc_train.launchers.slurm import batch_job, begin, evaluations, evidence
from hpc_train.launchers.slurm.batch_job import IN_PLACE, NUM_NODES, BatchJob, say
from hpc_train.launchers.slurm.evidence import Diagnosis, Facts
from hpc_train.paths import RunPaths
from hpc_train.recovery import bad_nodes, budgets
from hpc_train.recovery.diagnosis import Stop, one_line, stopped_by_signal
from hpc_train.recovery.history import effective_recovery, first_row, records, step_for_budgets
from hpc_train.run import attempts, evaluation_jobs, resource_limits
from hpc_train.run.files import read_json, tail_text
from hpc_train.run.run_status import RunStatus, read_status, write_status
from hpc_train.run.storage_errors import retried, storage_error

#: The last lines of a traceback identify the error; the file has more.
_ERROR_BYTES = 1 << 16
GIVEN_UP = "stop 1"
#: Causes that end all runs of a shared job at the same time.
_OF_THE_JOB = {"preemption", "requeue", "time limit"}
#: The duration of a start that did not reach its first step. Assumed.
_START_S = 60.0
#: Before the end of the user's own allocation, SIGTERM comes from its limit. Slurm may be a minute early.
_LAST_S = 60.0
#: The stop signals that have arrived here: the batch script ignores them meanwhile.
_stops: list[int] = []


def after(folder: Path, srun_code: int, environ: Mapping[str, str]) -> str:
    """Diagnose the attempt, write the diagnosis to the run's folder, return the script's next action."""
    ended = attempts.now_ms()
    job = BatchJob.of(folder, environ)
    number = int(environ["HPC_TRAIN_ATTEMPT"])
    if (newest := attempts.newest_number(job.paths)) > number:
        say(f"attempt {newest} of run {job.paths.folder.name} continues instead of {number}")
        return GIVEN_UP
    if not job.paths.folder.is_dir():
        raise BadFileError(f"run {job.paths.folder.name}: {job.paths.folder} is gone; nothing to do")
    record = attempts.read_record(job.paths.attempt(number))
    if record is None:
        raise HpcTrainError(f"{job.paths.attempt(number).record}: missing or not JSON")
    # What is granted may have been changed since the start.
    record = replace(record, **batch_job.granted(job.submission, environ))
    facts = gather(job, record, srun_code)
    diagnosis = evidence.judge(facts)
    if job.is_allocation:
        diagnosis = evidence.stopped(diagnosis, facts, _stop_in_allocation(job, facts, environ))
    if diagnosis.cause == "time limit" and (sentence := batch_job.limit_words(record)):
        diagnosis = replace(diagnosis, reason=f"{diagnosis.reason}; {sentence}")
    final = _ended_record(job.paths, record, diagnosis, srun_code, ended)
    so_far = [*job.earlier(number), final]
    recovery = effective_recovery(job.paths, number) if diagnosis.state == "requeued" else None
    if recovery is not None:
        spent = batch_job.used_gpu_hours(job.paths, final)
        # In the user's own allocation only restarts in place have a budget.
        if not job.is_allocation or diagnosis.cause in budgets.CRASHES:
            diagnosis = diagnosis.decided(budgets.decide(so_far, recovery, spent))
    may_stay, excluded = False, dict[str, str]()
    if recovery is not None and diagnosis.state == "requeued":
        excluded = bad_nodes.excluded([*records(job.paths), final], recovery.exclude_nodes_for_h)
        may_stay = budgets.may_stay(so_far, recovery, has_other_nodes=NUM_NODES in environ)
        may_stay = may_stay and _can_stay(job, final, environ)
        may_stay = may_stay and _has_nodes(so_far, recovery, excluded, environ)
        if job.is_allocation and not may_stay:
            diagnosis = evidence.in_allocation(diagnosis, job.paths.folder.name)
    if diagnosis.reason is not None:
        say(f"{diagnosis.state}: {diagnosis.reason}")  # first, since the disk may be full for all else
    notify_end(job.paths, say, _write(job.paths, final, diagnosis))
    if evaluation_jobs.VARIABLE in environ:
        evaluations.end_attempt(job, environ)
    if job.is_shared and diagnosis.state == "requeued" and (_stops or diagnosis.cause in _OF_THE_JOB):
        with _reporting_errors(job.paths):
            job.stopping.touch()
    return diagnosis.words(excluded, in_place=may_stay)


def _stop_in_allocation(job: BatchJob, facts: Facts, environ: Mapping[str, str]) -> Stop | None:
    """Return why the run was asked to stop in the user's own allocation; None if it was not.

    Ranks receive SIGTERM from Slurm and, as SIGUSR2, from the command that follows them at the end of the
    allocation's time, which is shorter than its limit if the user cancels it.
    """
    name = facts.signal
    with suppress(OSError):
        name = job.stop_request.read_text(encoding="utf-8").strip() or name
    if name is None or name not in signal.Signals.__members__:
        return None
    if name in {"SIGINT", "SIGKILL"}:  # the second Ctrl-C
        return stopped_by_signal(signal.SIGINT)
    begin_s, end_s = batch_job.job_time("StartTime", environ), batch_job.job_time("EndTime", environ)
    if begin_s is not None and end_s is not None and time.time() > end_s - _LAST_S:
        is_by_limit = end_s - begin_s >= (batch_job.time_limit_s(environ) or math.inf) - 1
    else:
        is_by_limit = False
    if name == "SIGUSR2" or is_by_limit:
        return Stop("time limit")
    is_preempted = batch_job.job_time("PreemptTime", environ) is not None
    return Stop("preemption") if is_preempted else stopped_by_signal(signal.Signals[name])


def _has_nodes(
    so_far: Sequence[attempts.AttemptRecord],
    recovery: budgets.Limits,
    excluded: Mapping[str, str],
    environ: Mapping[str, str],
) -> bool:
    """Return True if the job has enough nodes that respond and that the next attempt may use."""
    last = so_far[-1]
    allocated = batch_job.allocated_hosts(environ) if NUM_NODES in environ else last.hosts
    if NUM_NODES in environ and environ.get("SLURMD_NODENAME") not in {None, *allocated}:
        # A job that outlives its first node is requeued from another one: an attempt would soon be ended.
        say("Slurm has given up the node of the batch script, so there is no restart in place")
        return False
    hosts, are_fit = batch_job.nodes_of_ranks(allocated, excluded, environ)
    if not are_fit:
        say("too few of the job's nodes respond and may be used, so there is no restart in place")
        return False
    return budgets.may_stay(so_far, recovery, has_other_nodes=hosts != last.hosts)


def _can_stay(job: BatchJob, record: attempts.AttemptRecord, environ: Mapping[str, str]) -> bool:
    """Return True if nothing else wants the job's nodes and enough time is left.

    What Slurm's answers lack counts as not given, since a requeue is always possible. The time until the
    warning before the limit must be enough for the start, as long as this attempt's, and for a checkpoint.
    """
    is_stopped = bool(_stops) or attempts.noted_signal(job.paths.attempt(record.attempt)) is not None
    if is_stopped or not batch_job.still_runs(environ, job.restart):
        return False
    begun_s = _seconds(record.events.get("begin", record.start))
    preempted_s = batch_job.preempted_at(environ)
    if preempted_s is None or preempted_s >= begun_s - 1:
        return False
    earlier = job.earlier(record.attempt)
    first = next((start for start in earlier if start.restart == record.restart), record)
    end_s = batch_job.ends_at(environ, _seconds(first.start), record.time_limit_s)
    if end_s is None or end_s - time.time() < _needed_s(job, record, begun_s):
        say("too little time is left to restart in place")
        return False
    return True


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _needed_s(job: BatchJob, record: attempts.AttemptRecord, begun_s: float) -> float:
    """Return the seconds of a start, of training up to a checkpoint, and of the warning before the limit."""
    saving = (read_json(job.paths.resolved) or {}).get("checkpoint") or {}
    every_min = saving.get("every_min") or (0.0 if saving.get("every_steps") else DEFAULT_SAVE_EVERY_MIN)
    if saving.get("every") is not None:
        every_min = record.save_interval.get("every_s", 60 * every_min) / 60
    first_step = record.events.get("first_step")
    start_s = _START_S if first_step is None else max(0.0, _seconds(first_step) - begun_s)
    lead_s = record.lead_s if record.lead_s is not None else batch_job.warning_s(job.submission)
    return float(start_s + 60 * every_min + (record.save_s or 0.0) + lead_s)


def verdict_on_slots(jobs: Sequence[BatchJob], slot_code: int) -> str:
    """Return the verdict on a job that several runs share: one requeue for all that are not finished."""
    verdicts = [job.verdict or "" for job in jobs]
    requeues = [verdict.split() for verdict in verdicts if verdict.startswith("requeue ")]
    waiting = [job.paths.folder.name for job in jobs if not job.is_claimed and job.is_unfinished]
    if waiting:
        say(f"{len(waiting)} of {len(jobs)} runs have not begun: {listed(waiting, 5)}")
    # A slot that can't begin a run would not begin it after a requeue either: that is counted elsewhere.
    if requeues or (waiting and (slot_code == 0 or jobs[0].stopping.exists())):
        nodes = {node for _, _, *lists in requeues for names in lists for node in names.split(",")}
        return f"requeue {int(ExitCode.TRY_AGAIN)} {','.join(sorted(nodes))}".rstrip()
    ended = [verdict for job, verdict in zip(jobs, verdicts, strict=True) if job.is_claimed]
    has_failed = any(read_status(job.paths).state in {"failed", "cancelled"} for job in jobs)
    return "stop 1" if waiting or has_failed or set(ended) - {"stop 0"} else "stop 0"


def refused(folder: Path, refusal: str, environ: Mapping[str, str]) -> None:
    """Write that runs have failed although they were to be requeued: Slurm does not start their job again."""
    for job in BatchJob.with_each_run(folder, environ):
        _write_refusal(job, refusal)


def _write_refusal(job: BatchJob, refusal: str) -> None:
    paths, number = job.paths, attempts.newest_number(job.paths)
    status, record = read_status(paths), attempts.read_record(paths.attempt(number))
    if status.state != "requeued" or record is None or not job.owns(record):
        return
    if record.restart != job.restart:  # the job has begun its next attempt
        return
    resume = f"`hpc-train resume {paths.folder.name}` continues it"
    reason = one_line("; ".join(filter(None, (status.reason, refusal, resume))))
    status = replace(status, state="failed", reason=reason)
    notify_end(paths, say, status)
    with _reporting_errors(paths):
        attempts.write_record(paths.attempt(number), replace(record, reason=reason))
        write_status(paths, status)


def gather(job: BatchJob, record: attempts.AttemptRecord, srun_code: int) -> Facts:
    """Read the evidence that the attempt has left."""
    paths, attempt = job.paths, job.paths.attempt(record.attempt)
    status, stop, ends = read_status(paths), attempts.noted_signal(attempt), attempts.rank_ends(attempt)
    output = batch_job.output_of(job.submission.folder, job.job, record.attempt, paths.folder.name)
    logs = attempt.files_of_ranks(".log")
    # Only 64 logs are read, first of the ranks whose end srun reports.
    read = [rank for rank in dict.fromkeys([*evidence.reported_ranks(output), *logs]) if rank in logs][:64]
    dated = []
    for rank, path in attempt.files_of_ranks(".error").items():
        text = tail_text(path, _ERROR_BYTES).strip() or "said nothing"
        dated.append((path.stat().st_mtime_ns, rank, text))
    return Facts(
        srun_code=srun_code,
        is_completed=status.state == "completed",
        is_cancelled=paths.cancelled.exists(),
        errors={rank: text for _, rank, text in sorted(dated)},
        codes={rank: end.code for rank, end in ends.items()},
        nodes={rank: end.node for rank, end in ends.items() if end.node is not None},
        hosts=record.hosts,
        is_first_attempt=record.attempt == 1,
        signal=stop,
        is_early=stop == "SIGUSR2" and not job.is_allocation and _is_early(paths, record),
        step=status.step,
        output=output,
        logs={rank: telling_line(path) if rank in read else "" for rank, path in logs.items()},
        limits=resource_limits.current(),
    )


def _is_early(paths: RunPaths, record: attempts.AttemptRecord) -> bool:
    """Return True if the signal came earlier than the warning: by half of the time limit, or its lead.

    Some sites send the warning's signal at preemption. The limit is the granted one, if it is known.
    """
    from hpc_train.launchers.slurm.profiles import slurm_of  # 0.3 s, which a requeue seldom needs
    from hpc_train.run.create import effective_experiment

    slurm = slurm_of(effective_experiment(paths, record.attempt))
    if slurm is None or not {"begin", "signal"} <= record.events.keys():
        return False
    limit_s = record.time_limit_s or (slurm.time_limit or 0) * 60
    if not limit_s:
        return False
    lasted = datetime.fromisoformat(record.events["signal"]) - datetime.fromisoformat(record.events["begin"])
    earliest_s = min(limit_s / 2, limit_s - (slurm.signal_lead_s or 0))
    # Slurm may be a minute early, so with shorter limits this can't be decided.
    return lasted.total_seconds() < earliest_s - 60


def _ended_record(
    paths: RunPaths, record: attempts.AttemptRecord, diagnosis: Diagnosis, srun_code: int, ended: str
) -> attempts.AttemptRecord:
    return replace(
        record,
        end=attempts.now(),
        cause=diagnosis.cause,
        reason=diagnosis.reason,
        events=record.events | {"end": ended},
        exit_codes=_all_codes(
            record.ranks or 0, attempts.exit_codes(paths.attempt(record.attempt)), srun_code, diagnosis
        ),
        bad_nodes=diagnosis.bad_nodes,
        saved_step=step_for_budgets(paths, record.attempt),
        first_row=first_row(paths, record.attempt),
    )


def _write(paths: RunPaths, final: attempts.AttemptRecord, diagnosis: Diagnosis) -> RunStatus:
    requeue = {"requeue": attempts.now_ms()} if diagnosis.state == "requeued" else {}
    final = replace(final, reason=diagnosis.reason, events=final.events | requeue)
    with _reporting_errors(paths):
        attempts.write_record(paths.attempt(final.attempt), final)
    status = read_status(paths)
    if diagnosis.state != "completed":
        # Ranks of a cancelled run no longer write status.json, but save before they end.
        step = max(status.step, final.saved_step or 0)
        status = replace(status, state=diagnosis.state, step=step, reason=diagnosis.reason)
        with _reporting_errors(paths):
            write_status(paths, status)
    return status


@contextmanager
def _reporting_errors(paths: RunPaths) -> Iterator[None]:
    """Report a disk error: it affects neither the job's next action nor the notification."""
    try:
        yield
    except OSError as error:
        say(f"how the attempt ended can't be written: {storage_error(error, paths.folder)}")


def _all_codes(
    num_ranks: int, reported: dict[int, int], srun_code: int, diagnosis: Diagnosis
) -> list[int] | None:
    """Return the ranks' codes if all are known; srun's is the highest of them, but 0 after a lost node."""
    is_completed = srun_code == 0 and diagnosis.cause == "completed"
    if is_completed or (srun_code == 75 and reported.get(0) == 75):
        return [srun_code] * num_ranks
    return [reported[rank] for rank in range(num_ranks)] if reported.keys() >= set(range(num_ranks)) else None


def main(arguments: Iterable[str]) -> int:
    """Print the result of ``after``, or ``stop 1`` for any error, which fails the run; return 0."""
    folder, code, *more = arguments
    verdict, submission = GIVEN_UP, Path(folder).absolute()
    if code == "refused":
        refused(submission, " ".join(more), os.environ)
        return 0
    if code == "slots":
        batch_job.answer(verdict_on_slots(BatchJob.with_each_run(submission, os.environ), int(more[0])))
        return 0
    # The batch script ignores SIGTERM meanwhile, and so would this process: it may be a preemption's.
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _stops.append(number))
    try:
        verdict = retried(lambda: after(submission, int(code), os.environ), submission, tells=False)
    except BaseException as error:  # on any error the script needs an answer
        say(str(error)) if isinstance(error, UserError) else traceback.print_exc()
        with suppress(BaseException):
            paths = BatchJob.of(submission, os.environ).paths
            reason = one_line(f"how the attempt ended could not be judged: {type(error).__name__}: {error}")
            status = replace(read_status(paths), state="failed", reason=reason)
            with suppress(OSError):
                write_status(paths, status)
            notify_end(paths, say, status)
    _note(submission, verdict)
    batch_job.answer(_begun(submission) if verdict == "again" and not _stops else verdict)
    return 0


def _begun(submission: Path) -> str:
    """Begin the next attempt in place; return the verdict with the code and the answer of ``begin``.

    In a job that several runs share its slot calls ``begin``.
    """
    if BatchJob.of(submission, os.environ).is_shared:
        return "again"
    os.environ[IN_PLACE] = "1"
    try:
        code, line = begin.begun(submission)
    except Exception:
        traceback.print_exc()
        code, line = int(ExitCode.FAILED), None
    return f"again {code} {line or ''}".rstrip(" ")


def _note(submission: Path, verdict: str) -> None:
    """Record a run's verdict in a job that several share, for the job's own."""
    with suppress(BaseException):
        job = BatchJob.of(submission, os.environ)
        if job.is_shared and verdict != "again":
            job.note_verdict(verdict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
