"""What a run's attempts have left: for the decision about the next one, and where a launcher died."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.recovery import bad_nodes
from hpc_train.recovery.budgets import Limits, ResolvedLimits
from hpc_train.recovery.diagnosis import (
    LAUNCHER_DIED,
    Diagnosis,
    LostAttempt,
    Stop,
    diagnose_lost,
    silent_for,
)
from hpc_train.run.attempts import AttemptRecord, newest_number, now, read_record
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import read_json
from hpc_train.run.liveness import lives, living, newest_record, silent_s
from hpc_train.run.processes import Process
from hpc_train.run.rank_ends import exit_codes, rank_ends
from hpc_train.run.run_facts import run_facts
from hpc_train.run.run_status import RunStatus, read_status, write_status


def effective_recovery(paths: RunPaths, attempt: int) -> Limits:
    """Return the limits that apply to the attempt. Raises BadFileError where the frozen file is damaged."""
    if not run_facts(paths).get("changes") and (limits := _resolved(paths)):
        return limits
    from hpc_train.run.create import effective_experiment  # the schema: 0.2 s, which few runs need

    return effective_experiment(paths, attempt).recovery


def _resolved(paths: RunPaths) -> ResolvedLimits | None:
    """Return the limits that ``resolved.json`` has; None if it can't be read as such."""
    section = (read_json(paths.resolved) or {}).get("recovery")
    return ResolvedLimits.of(section) if isinstance(section, dict) else None


def nodes_to_exclude(paths: RunPaths) -> dict[str, str]:
    """Return the nodes that the run's next attempt excludes, and why."""
    found = records(paths)
    if not any(record.bad_nodes for record in found):
        return {}
    hours = effective_recovery(paths, newest_number(paths) + 1).exclude_nodes_for_h
    return bad_nodes.excluded(found, hours)


def records(paths: RunPaths) -> list[AttemptRecord]:
    """Return the records of all attempts, the first one first."""
    return [record for attempt in paths.attempt_folders() if (record := read_record(attempt)) is not None]


def saved_step(paths: RunPaths, attempt: int) -> int:
    """Return the step of the newest checkpoint that counts for the attempt, 0 without one."""
    return max((checkpoint.step for checkpoint in committed(paths, attempt)), default=0)


def diagnose_record(
    paths: RunPaths,
    record: AttemptRecord,
    *,
    step: int,
    stop: Stop | None,
    dead_nodes: Sequence[str] = (),
    is_requeued: bool = True,
) -> Diagnosis:
    """Return why an attempt ended whose launcher could not say it, by what its ranks have left.

    ``stop``: what asked it to stop; ``dead_nodes``: of its nodes, according to the scheduler.
    """
    attempt = paths.attempt(record.attempt)
    unfit = {}
    for rank, end in rank_ends(attempt).items():
        if end.node is not None and end.code == ExitCode.BAD_NODE:
            unfit[end.node] = bad_nodes.FAILED_CHECK
        elif end.node is not None and end.code == ExitCode.HUNG:
            unfit[end.node] = f"rank {rank} hung"
    has_stopped = "saved" in record.events or exit_codes(attempt).get(0) == ExitCode.TRY_AGAIN
    return diagnose_lost(LostAttempt(step, stop, has_stopped, is_requeued, dead_nodes, unfit))


def ended_unseen(paths: RunPaths, record: AttemptRecord, found: Diagnosis) -> AttemptRecord:
    """Return the record of an attempt whose launcher could not write its end."""
    return replace(
        record,
        end=_last_write(paths.attempt(record.attempt).folder) or now(),
        cause=found.cause,
        reason=found.reason,
        bad_nodes=record.bad_nodes | found.bad_nodes,
        saved_step=saved_step(paths, record.attempt),
    )


def _last_write(folder: Path) -> str | None:
    with suppress(OSError):
        latest = max((path.stat().st_mtime for path in folder.iterdir()), default=None)
        if latest is not None:
            return datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
    return None


def current_status(paths: RunPaths) -> RunStatus:
    """Return the status of the run; one whose local launcher is dead is recorded as ``failed``."""
    status = read_status(paths)
    if status.state not in {"pending", "running"}:
        return status
    if (silence := _silence(paths)) is not None:
        return replace(status, state="failed", reason=silence)
    if not _is_orphaned(paths):
        return status
    latest = read_status(paths)  # its launcher may have written the end just before it ended
    if latest.state not in {"pending", "running"}:
        return latest
    corrected = replace(latest, state="failed", reason=LAUNCHER_DIED)
    with suppress(OSError):  # another user's run, or a full disk: report it nevertheless
        write_status(paths, corrected)
    return corrected


def _silence(paths: RunPaths) -> str | None:
    """Return the reason of a run that can't be seen from here and has been silent for long; else None.

    Not written: the machine may only be disconnected, and its heartbeats return.
    """
    record = newest_record(paths)
    if record is None or living(record) is not None or lives(paths, record) is not False:
        return None
    assert record.launcher_process is not None
    return silent_for(record.launcher_process.host, silent_s(paths, record))


def _is_orphaned(paths: RunPaths) -> bool:
    """Tell whether a process of this machine was responsible for the run and is certainly gone."""
    record = newest_record(paths)
    if record is not None and record.launcher not in {None, "local"}:
        return False  # what it queued outlives the command that claimed the attempt
    if record is not None:
        return living(record) is False
    run = read_json(paths.run) or {}
    creator = Process.from_json(run.get("creator"))
    return run.get("launcher") == "local" and creator is not None and creator.is_alive() is False
