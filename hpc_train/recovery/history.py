"""Reads the files of a run's attempts, for the next attempt and after the death of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.recovery import bad_nodes
from hpc_train.recovery.budgets import Limits, ResolvedLimits
from hpc_train.recovery.diagnosis import LAUNCHER_DIED, Diagnosis, Stop, diagnose_lost, silent_for
from hpc_train.run.attempts import AttemptRecord, exit_codes, newest_number, now, rank_ends, read_record
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import read_json
from hpc_train.run.liveness import lives, living, newest_record, silent_s
from hpc_train.run.metric_rows import rows_from_end
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, run_facts, write_status
from hpc_train.run.stage_order import waiting_words


def effective_recovery(paths: RunPaths, attempt: int) -> Limits:
    """Return the limits that apply to the attempt. Raises BadFileError if the frozen file is damaged."""
    if not run_facts(paths).get("changes"):
        section = (read_json(paths.resolved) or {}).get("recovery")
        if isinstance(section, dict) and (limits := ResolvedLimits.of(section)):
            return limits
    from hpc_train.run.create import effective_experiment  # the schema: 0.2 s, which few runs need

    return effective_experiment(paths, attempt).recovery


def nodes_to_exclude(paths: RunPaths) -> dict[str, str]:
    """Return the nodes that the run's next attempt excludes, with the reasons."""
    attempts = records(paths)
    if not any(record.bad_nodes for record in attempts):
        return {}
    hours = effective_recovery(paths, newest_number(paths) + 1).exclude_nodes_for_h
    return bad_nodes.excluded(attempts, hours)


def records(paths: RunPaths) -> list[AttemptRecord]:
    """Return the records of all attempts, in order."""
    return [record for attempt in paths.attempt_folders() if (record := read_record(attempt)) is not None]


def saved_step(paths: RunPaths, attempt: int) -> int:
    """Return the step of the newest checkpoint that counts for the attempt; 0 without a checkpoint."""
    return max((checkpoint.step for checkpoint in committed(paths, attempt)), default=0)


def step_for_budgets(paths: RunPaths, attempt: int) -> int | None:
    """Return the ``saved_step`` of the attempt's record; None for a program that has saved nothing by
    ``session``: it may have checkpoints of its own, so attempts without progress are not counted.
    """
    step = saved_step(paths, attempt)
    return None if step == 0 and run_facts(paths).get("workload") == "program" else step


def first_row(paths: RunPaths, attempt: int) -> int | None:
    """Return the step of the attempt's first row of metrics if its ``step_for_budgets`` is unknown."""
    if step_for_budgets(paths, attempt) is not None:
        return None
    rows = takewhile(lambda row: row.get("attempt") == attempt, rows_from_end(paths.metrics))
    return min((row["step"] for row in rows), default=None)


def diagnose_record(
    paths: RunPaths,
    record: AttemptRecord,
    *,
    step: int,
    stop: Stop | None,
    dead_nodes: Sequence[str] = (),
    is_requeued: bool = True,
) -> Diagnosis:
    """Return the diagnosis of an attempt whose launcher could not write its end, from its ranks' files.

    ``stop``: the request to stop; ``dead_nodes``: its nodes that died according to the scheduler.
    """
    attempt = paths.attempt(record.attempt)
    unfit = dict.fromkeys(dead_nodes, bad_nodes.DIED)
    for rank, end in rank_ends(attempt).items():
        if end.node is not None and end.code == ExitCode.BAD_NODE:
            unfit[end.node] = bad_nodes.FAILED_CHECK
        elif end.node is not None and end.code == ExitCode.UNEQUAL:
            unfit[end.node] = bad_nodes.UNEQUAL
        elif end.node is not None and end.code == ExitCode.HUNG:
            unfit[end.node] = f"rank {rank} hung"
    has_stopped = "saved" in record.events or exit_codes(attempt).get(0) == ExitCode.TRY_AGAIN
    return diagnose_lost(step, stop, has_stopped=has_stopped, is_requeued=is_requeued, bad_nodes=unfit)


def ended_unseen(paths: RunPaths, record: AttemptRecord, diagnosis: Diagnosis) -> AttemptRecord:
    """Return the record of an attempt whose launcher could not write its end."""
    return replace(
        record,
        end=_last_write(paths.attempt(record.attempt).folder) or now(),
        cause=diagnosis.cause,
        reason=diagnosis.reason,
        bad_nodes=record.bad_nodes | diagnosis.bad_nodes,
        saved_step=step_for_budgets(paths, record.attempt),
        first_row=first_row(paths, record.attempt),
    )


def _last_write(folder: Path) -> str | None:
    with suppress(OSError):
        latest = max((path.stat().st_mtime for path in folder.iterdir()), default=None)
        if latest is not None:
            return datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
    return None


def current_status(paths: RunPaths) -> RunStatus:
    """Return the status of the run; a run whose local launcher is dead is recorded as ``failed``."""
    status = read_status(paths)
    if status.state not in {"pending", "running"}:
        return status
    if status.state == "pending" and (reason := waiting_words(paths)) is not None:
        return replace(status, reason=reason)
    if (silence := _silence(paths)) is not None:
        return replace(status, state="failed", reason=silence)
    if not _is_orphaned(paths):
        return status
    latest = read_status(paths)  # the launcher may have written the end just before it ended
    if latest.state not in {"pending", "running"}:
        return latest
    corrected = replace(latest, state="failed", reason=LAUNCHER_DIED)
    with suppress(OSError):  # another user's run, or a full disk: still return the status
        write_status(paths, corrected)
    return corrected


def _silence(paths: RunPaths) -> str | None:
    """Return the reason of a run on another machine that has been silent for long; else None.

    Not written to the status, because the machine may only be disconnected and its heartbeats return.
    """
    record = newest_record(paths)
    if record is None or living(record) is not None or lives(paths, record) is not False:
        return None
    assert record.launcher_process is not None
    return silent_for(record.launcher_process.host, silent_s(paths, record))


def _is_orphaned(paths: RunPaths) -> bool:
    """Return True if a process of this machine was responsible for the run and has certainly ended."""
    record = newest_record(paths)
    if record is not None and record.launcher not in {None, "local"}:
        return False  # the queued job outlives the command that claimed the attempt
    if record is not None:
        return living(record) is False
    run = read_json(paths.run) or {}
    creator = Process.from_json(run.get("creator"))
    return run.get("launcher") == "local" and creator is not None and creator.is_alive() is False
