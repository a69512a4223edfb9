"""The time from an interruption to the next step, from the attempts' records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hpc_train.paths import RunPaths
from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.run.attempts import AttemptRecord, read_record


@dataclass(frozen=True)
class Restart:
    """The parts of the newest interruption; None for one that is not over, or was not recorded."""

    cause: str | None
    signal_to_saved_s: float | None
    saved_to_requeue_s: float | None
    requeue_to_begin_s: float | None
    begin_to_first_step_s: float | None


def newest_restart(paths: RunPaths) -> Restart | None:
    """Return the newest interruption; None if there was none."""
    records = [record for attempt in paths.attempt_folders() if (record := read_record(attempt))]
    if records and records[-1].job and records[-1].cause in COMES_BACK:
        return _between(records[-1], None)
    if len(records) > 1 and records[-2].job and records[-1].job:
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
