"""A run's elapsed, remaining and recovery time, from its attempts' records and newest rows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.report.metrics_reader import Row, number
from hpc_train.run.attempts import AttemptRecord

if TYPE_CHECKING:
    from hpc_train.paths import AttemptPaths
    from hpc_train.report.run_files import RunFiles
    from hpc_train.run.run_status import RunStatus


def elapsed_s(run: RunFiles, now: RunStatus) -> float | None:
    """Return the seconds of all attempts together, without the time in queues; None before the first.

    An attempt that ended without a record lasted until the last line of rank 0's log.
    """
    if not run.recorded:
        return None
    return sum((end - start for _, (start, end) in attempt_spans(run, now)), start=0.0)


def attempt_span(
    attempt: AttemptPaths, record: AttemptRecord, *, is_running: bool
) -> tuple[float, float] | None:
    """Return when an attempt began and ended, in seconds since 1970; None if unknown.

    A running attempt ends now; one without a recorded end, at the last line of rank 0's log.
    """
    start = timestamp(record.start)
    end = timestamp(record.end)
    if end is None and is_running:
        end = time.time()
    if end is None:
        with suppress(OSError):
            end = attempt.log(0).stat().st_mtime
    return None if start is None or end is None else (start, max(start, end))


def attempt_spans(run: RunFiles, now: RunStatus) -> list[tuple[AttemptRecord, tuple[float, float]]]:
    """Return the attempts with a known ``attempt_span``, and the span."""
    return [
        (record, span)
        for attempt, record in run.recorded
        if (span := attempt_span(attempt, record, is_running=run.is_running(record, now)))
    ]


def timestamp(text: str | None) -> float | None:
    """Return an ISO 8601 time as seconds since 1970; None if it is invalid."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def remaining_s(now: RunStatus, rows: Sequence[Row]) -> float | None:
    """Return the seconds until a running run's last step at the rate of its newest rows; None if unknown.

    Also unknown if ``now`` has a reason: the run is suspended, or about to end.
    """
    mine = [row for row in rows if row.get("attempt") == now.attempt and row.get("split") == "train"]
    pairs = [(number(row.get("time")), number(row.get("step"))) for row in mine]
    points = [(at, step) for at, step in pairs if at is not None and step is not None]
    if now.state != "running" or now.reason or now.total_steps is None or len(points) < 2:
        return None
    (first_time, first_step), (last_time, last_step) = points[0], points[-1]
    if last_step <= first_step or last_time <= first_time:
        return None
    rate = (last_step - first_step) / (last_time - first_time)
    left_s = (now.total_steps - last_step) / rate - (time.time() - last_time)
    return max(0.0, left_s) if math.isfinite(left_s) else None


def short_duration(seconds: float | None) -> str:
    """Return at most six characters: ``45s``, ``12m30s``, ``1h02m``, ``3d04h``; empty for None."""
    if seconds is None:
        return ""
    whole = round(seconds)
    for unit, part, size, parts in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // parts:02}{part}"
    return f"{whole}s"


def first_step_words(parts: Mapping[str, float]) -> str:
    """Return ``data 0.4 s, compile 35.1 s (3 graphs, 0 from the cache), first run 1.2 s``.

    ``parts``: ``AttemptRecord.first_step``; empty without.
    """
    data_s, compile_s, run_s = (parts.get(key) for key in ("data_s", "compile_s", "run_s"))
    if data_s is None or compile_s is None or run_s is None:
        return ""
    graphs = f" ({parts['graphs']} graphs, {parts.get('cached_graphs', 0)} from the cache)"
    compiled = f"compile {compile_s:.1f} s{graphs}, " if parts.get("graphs") else ""
    return f"data {data_s:.1f} s, {compiled}first run {run_s:.1f} s"


def node_words(record: AttemptRecord) -> str:
    """Return ``n1, n3 (spare: n4)``: the nodes of the attempt's ranks, and those without ranks."""
    spare = f" (spare: {', '.join(record.spare_hosts)})" if record.spare_hosts else ""
    return f"{', '.join(record.hosts)}{spare}"


@dataclass(frozen=True)
class Restart:
    """From an interruption to the next step, in parts; None for one that is not over, or was not recorded."""

    cause: str | None
    #: Whether the next attempt began in the same allocation.
    in_place: bool
    signal_to_saved_s: float | None
    saved_to_requeue_s: float | None
    requeue_to_begin_s: float | None
    begin_to_first_step_s: float | None


def newest_restart(records: Sequence[AttemptRecord]) -> Restart | None:
    """Return the newest interruption of a run with these attempts; None if there was none."""
    if records and records[-1].job and records[-1].cause in COMES_BACK:
        return _between(records[-1], None)
    if len(records) > 1 and records[-2].job and records[-1].job:
        return _between(records[-2], records[-1])
    return None


def _between(before: AttemptRecord, after: AttemptRecord | None) -> Restart:
    old, new = before.events, after.events if after else {}
    return Restart(
        cause=before.cause,
        in_place=after is not None and after.in_place,
        signal_to_saved_s=_seconds(old.get("signal"), old.get("saved")),
        saved_to_requeue_s=_seconds(old.get("saved"), old.get("requeue")),
        requeue_to_begin_s=_seconds(old.get("requeue"), new.get("begin")),
        begin_to_first_step_s=_seconds(new.get("begin"), new.get("first_step")),
    )


def _seconds(start: str | None, end: str | None) -> float | None:
    began, ended = timestamp(start), timestamp(end)
    return None if began is None or ended is None else round(ended - began, 3)
