"""Called by the batch script after srun, on the first node: diagnoses the attempt, decides about a requeue.

``python -m hpc_train.launchers.slurm.after SUBMISSION CODE`` (srun's exit code) records the diagnosis and
prints ``requeue 75 [NODES]`` (nodes to exclude) or ``stop CODE``; the script executes it, since Slurm can't
be reached from a container. ``after SUBMISSION refused WORDS`` records that Slurm refused the requeue.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hpc_train.errors import HpcTrainError
from hpc_train.experiment.topology.batch_arithmetic import DEFAULT_SAVE_EVERY_MIN
from hpc_train.launchers.notifications import notify_end
from hpc_train.launchers.outcome import telling_line
from hpc_train.launchers.slurm.batch_job import (
    BatchJob,
    answer,
    ends_at,
    gone_nodes,
    granted,
    limit_words,
    output_of,
    preempted_at,
    say,
    still_runs,
    used_gpu_hours,
    warning_s,
)
from hpc_train.launchers.slurm.evidence import Diagnosis, Facts, judge, reported_ranks
from hpc_train.paths import RunPaths
from hpc_train.recovery import budgets
from hpc_train.recovery.diagnosis import one_line
from hpc_train.recovery.history import effective_recovery, nodes_to_exclude, step_for_budgets
from hpc_train.run import resource_limits
from hpc_train.run.attempts import (
    AttemptRecord,
    exit_codes,
    newest_number,
    noted_signal,
    now,
    now_ms,
    rank_ends,
    read_record,
    write_record,
)
from hpc_train.run.files import read_json, tail_text
from hpc_train.run.run_status import RunStatus, read_status, write_status
from hpc_train.run.storage_errors import retried, storage_error

#: The last lines of a traceback identify the error; the file has more.
_ERROR_BYTES = 1 << 16
GIVEN_UP = "stop 1"
#: The duration of a start that did not reach its first step. Assumed.
_START_S = 60.0
#: The stop signals that have arrived here: the batch script ignores them meanwhile.
_stops: list[int] = []


def after(folder: Path, srun_code: int, environ: Mapping[str, str]) -> str:
    """Diagnose the attempt, write the diagnosis to the run's folder, return the script's next action."""
    ended = now_ms()
    job = BatchJob.of(folder, environ)
    number = int(environ["HPC_TRAIN_ATTEMPT"])
    if newest_number(job.paths) > number:
        say(
            f"attempt {newest_number(job.paths)} of run {job.paths.folder.name} continues instead of {number}"
        )
        return GIVEN_UP
    record = read_record(job.paths.attempt(number))
    if record is None:
        raise HpcTrainError(f"{job.paths.attempt(number).record}: missing or not JSON")
    record = replace(record, **granted(job.submission, environ))  # it may have been changed since the start
    may_stay = False
    diagnosis = judge(gather(job, record, srun_code))
    if diagnosis.cause == "time limit" and (sentence := limit_words(record)):
        diagnosis = replace(diagnosis, reason=f"{diagnosis.reason}; {sentence}")
    final = _ended_record(job.paths, record, diagnosis, srun_code, ended)
    if diagnosis.state == "requeued":
        recovery = effective_recovery(job.paths, number)
        spent = used_gpu_hours(job.paths, final)
        attempts = [*job.earlier(number), final]
        diagnosis = diagnosis.decided(budgets.decide(attempts, recovery, spent))
        may_stay = budgets.may_stay(attempts, recovery) and _can_stay(job, final, diagnosis, environ)
    if diagnosis.reason is not None:
        say(f"{diagnosis.state}: {diagnosis.reason}")  # first, since the disk may be full for all else
    notify_end(job.paths, say, _write(job.paths, final, diagnosis))
    excluded = nodes_to_exclude(job.paths) if diagnosis.state == "requeued" else {}
    return diagnosis.words(excluded, in_place=may_stay and excluded.keys().isdisjoint(record.hosts))


def _can_stay(job: BatchJob, record: AttemptRecord, diagnosis: Diagnosis, environ: Mapping[str, str]) -> bool:
    """Return True if the allocation can train on: nothing wants its nodes, which respond, and time is left.

    What Slurm's answers lack counts as not given, since a requeue is always possible. The time until the
    warning before the limit must be enough for the start, as long as this attempt's, and for a checkpoint.
    """
    is_stopped = bool(_stops) or noted_signal(job.paths.attempt(record.attempt)) is not None
    if diagnosis.state != "requeued" or is_stopped or not still_runs(environ, job.restart):
        return False
    begun_s = _seconds(record.events.get("begin", record.start))
    preempted_s = preempted_at(environ)
    if preempted_s is None or preempted_s >= begun_s - 1:
        return False
    first = next((other for other in job.earlier(record.attempt) if other.restart == record.restart), record)
    end_s = ends_at(environ, _seconds(first.start), record.time_limit_s)
    if end_s is None or end_s - time.time() < _needed_s(job, record, begun_s):
        say("too little time is left to restart in place")
        return False
    if gone := gone_nodes(record.hosts):
        say(f"{', '.join(gone)} does not respond, so there is no restart in place")
    return not gone


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _needed_s(job: BatchJob, record: AttemptRecord, begun_s: float) -> float:
    """Return the seconds of a start, of training up to a checkpoint, and of the warning before the limit."""
    saving = (read_json(job.paths.resolved) or {}).get("checkpoint") or {}
    every_min = saving.get("every_min") or (0.0 if saving.get("every_steps") else DEFAULT_SAVE_EVERY_MIN)
    first_step = record.events.get("first_step")
    start_s = _START_S if first_step is None else max(0.0, _seconds(first_step) - begun_s)
    lead_s = record.lead_s if record.lead_s is not None else warning_s(job.submission)
    return float(start_s + 60 * every_min + (record.save_s or 0.0) + lead_s)


def refused(folder: Path, refusal: str, environ: Mapping[str, str]) -> None:
    """Write that the run has failed although it was to be requeued: Slurm does not start its job again."""
    paths, number = BatchJob.of(folder, environ).paths, int(environ["HPC_TRAIN_ATTEMPT"])
    status, record = read_status(paths), read_record(paths.attempt(number))
    if status.state != "requeued" or newest_number(paths) != number or record is None:
        return
    resume = f"`hpc-train resume {paths.folder.name}` continues it"
    reason = one_line("; ".join(filter(None, (status.reason, refusal, resume))))
    status = replace(status, state="failed", reason=reason)
    notify_end(paths, say, status)
    with _reporting_errors(paths):
        write_record(paths.attempt(number), replace(record, reason=reason))
        write_status(paths, status)


def gather(job: BatchJob, record: AttemptRecord, srun_code: int) -> Facts:
    """Read the evidence that the attempt has left."""
    paths, attempt = job.paths, job.paths.attempt(record.attempt)
    status, stop, ends = read_status(paths), noted_signal(attempt), rank_ends(attempt)
    output = output_of(job.submission.folder, job.job, record.attempt)
    logs = attempt.files_of_ranks(".log")
    # Only 64 logs are read, first of the ranks whose end srun reports.
    read = [rank for rank in dict.fromkeys([*reported_ranks(output), *logs]) if rank in logs][:64]
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
        is_early=stop == "SIGUSR2" and _is_early(paths, record),
        step=status.step,
        output=output,
        logs={rank: telling_line(path) if rank in read else "" for rank, path in logs.items()},
        limits=resource_limits.current(),
    )


def _is_early(paths: RunPaths, record: AttemptRecord) -> bool:
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
    paths: RunPaths, record: AttemptRecord, diagnosis: Diagnosis, srun_code: int, ended: str
) -> AttemptRecord:
    """Return the record of the ended attempt, before its budget was checked."""
    return replace(
        record,
        end=now(),
        cause=diagnosis.cause,
        reason=diagnosis.reason,
        events=record.events | {"end": ended},
        exit_codes=_all_codes(record.ranks or 0, exit_codes(paths.attempt(record.attempt)), srun_code),
        bad_nodes=diagnosis.bad_nodes,
        saved_step=step_for_budgets(paths, record.attempt),
    )


def _write(paths: RunPaths, final: AttemptRecord, diagnosis: Diagnosis) -> RunStatus:
    """Write how the attempt and the run ended, as far as the disk has room; return the run's status."""
    requeue = {"requeue": now_ms()} if diagnosis.state == "requeued" else {}
    final = replace(final, reason=diagnosis.reason, events=final.events | requeue)
    with _reporting_errors(paths):
        write_record(paths.attempt(final.attempt), final)
    status = read_status(paths)
    if diagnosis.state != "completed":
        status = replace(status, state=diagnosis.state, reason=diagnosis.reason)
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


def _all_codes(num_ranks: int, reported: dict[int, int], srun_code: int) -> list[int] | None:
    """Return the ranks' codes if all are known; srun's code is the highest of them."""
    if srun_code == 0 or (srun_code == 75 and reported.get(0) == 75):
        return [srun_code] * num_ranks
    return [reported[rank] for rank in range(num_ranks)] if reported.keys() >= set(range(num_ranks)) else None


def main(arguments: Iterable[str]) -> int:
    """Print the result of ``after``, or ``stop 1`` for any error, which fails the run; return 0."""
    folder, code, *more = arguments
    verdict, submission = GIVEN_UP, Path(folder).absolute()
    if code == "refused":
        refused(submission, " ".join(more), os.environ)
        return 0
    # The batch script ignores SIGTERM meanwhile, and so would this process: it may be a preemption's.
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _stops.append(number))
    try:
        verdict = retried(lambda: after(submission, int(code), os.environ), submission, tells=False)
    except BaseException as error:  # on any error the script needs an answer
        traceback.print_exc()
        with suppress(BaseException):
            paths = BatchJob.of(submission, os.environ).paths
            reason = one_line(f"how the attempt ended could not be judged: {type(error).__name__}: {error}")
            status = replace(read_status(paths), state="failed", reason=reason)
            with suppress(OSError):
                write_status(paths, status)
            notify_end(paths, say, status)
    answer(verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
