"""How long a run took from an interruption to its next step, by the attempts' own records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hpc_train.launchers.slurm import LAUNCHER as SLURM
from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import AttemptRecord, read_record
from hpc_train.run_folder.budgets import COMES_BACK


@dataclass(frozen=True)
class Restart:
    """The newest interruption in its parts; None for one that is not over, or of which nothing was noted."""

    cause: str | None
    signal_to_saved_s: float | None
    saved_to_requeue_s: float | None
    requeue_to_begin_s: float | None
    begin_to_first_step_s: float | None


def newest_restart(paths: RunPaths) -> Restart | None:
    """Return the newest interruption; None where there was none yet."""
    records = [record for attempt in paths.attempt_folders() if (record := read_record(attempt))]
    if records and records[-1].launcher == SLURM and records[-1].cause in COMES_BACK:
        return _between(records[-1], None)
    if len(records) > 1 and records[-2].launcher == records[-1].launcher == SLURM:
        return _between(records[-2], records[-1])
    return None


def _between(before: AttemptRecord, after: AttemptRecord | None) -> Restart:
    old, new = before.events, after.events if after else {}
    return Restart(
        cause=before.cause,
        signal_to_saved_s=_seconds(old.get("signal"), old.get("saved")),
        saved_to_requeue_s=_seconds(old.get("saved"), old.get("requeue")),
        requeue_to_begin_s=_seconds(old.get("requeue"), new.get("begin")),
        begin_to_first_step_s=_seconds(new.get("begin"), new.get("first_step")),
    )


def _seconds(start: str | None, end: str | None) -> float | None:
    if start is None or end is None:
        return None
    try:
        return round((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 3)
    except ValueError:
        return None
