"""The parts of a run's allocated time, of which the first is goodput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpc_train.report.goodput import StepSeconds, counted_steps, step_seconds
from hpc_train.report.metrics_reader import Row, number
from hpc_train.report.run_times import attempt_spans, timestamp
from hpc_train.run.attempts import CAUSES

if TYPE_CHECKING:
    from hpc_train.report.run_files import RunFiles
    from hpc_train.run.attempts import AttemptRecord
    from hpc_train.run.run_status import RunStatus

#: In display order; the last one is the remaining time. ``training``: steps that count. ``data``: their waits
#: for data. ``saving``: waits for checkpoints. ``starting``: until an attempt's first step. ``stopping``:
#: from the signal to the end. ``lost``: steps that no checkpoint contains. ``other``: evaluations, and
#: unmeasured time.
PARTS = ("training", "data", "saving", "starting", "stopping", "lost", "other")


def time_use(run: RunFiles, now: RunStatus, rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each of ``PARTS``; their sum is the time of all attempts. Empty before the first.

    ``rows``: the rows of ``metrics.jsonl``. A part that was not recorded is 0.
    """
    spans = attempt_spans(run, now)
    total_s = sum(end - start for _, (start, end) in spans)
    if not total_s:
        return {}
    last_rows = _last_row_times(rows)
    starting = stopping = lost = 0.0
    for record, (start, end) in spans:
        trained_until = last_rows.get(record.attempt)
        first = timestamp(record.events.get("first_step"))
        begun = min(first, end) if first is not None else start if trained_until is not None else end
        starting += max(0.0, begun - start)
        signal = timestamp(record.events.get("signal"))
        if signal is not None:
            stopping += max(0.0, end - max(signal, begun))
        elif record.cause not in {None, "completed"}:
            lost += max(0.0, end - max(trained_until or begun, begun))
    steps = counted_steps(run.paths, now)
    counted = step_seconds(rows, steps) or StepSeconds(0.0, 0.0)
    done = counted if steps == now.step else step_seconds(rows, now.step) or StepSeconds(0.0, 0.0)
    lost += max(0.0, done.useful - counted.useful)
    parts = {
        "training": counted.useful,
        "data": counted.waited,
        "saving": sum(record.checkpoint_stall_s or 0.0 for record, _ in spans),
        "starting": starting,
        "stopping": stopping,
        "lost": lost,
    }
    return _within(total_s, parts)


def _last_row_times(rows: Iterable[Row]) -> Mapping[int, float]:
    """Return the time of each attempt's last row."""
    found: dict[int, float] = {}
    for row in rows:
        attempt, time = row.get("attempt"), number(row.get("time"))
        if type(attempt) is int and time is not None:
            found[attempt] = time
    return found


def evaluation_seconds(rows: Iterable[Row]) -> list[float]:
    """Return the duration of each evaluation: from the previous row to its own, minus the steps between.

    Evaluations at the same step, such as the evaluation of the averaged weights, run one after the other.
    """
    found: list[float] = []
    step_s, before = 0.0, None
    for row in rows:
        step, time = row.get("step"), number(row.get("time"))
        step_s = number(row.get("step_s")) or step_s
        if type(step) is not int or time is None or number(step) is None:
            continue
        if row.get("split") == "val" and before is not None and row.get("attempt") == before[2]:
            found.append(max(0.0, time - before[0] - (step - before[1]) * step_s))
        before = time, step, row.get("attempt")
    return found


def _within(total_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts and the rest of the time; if estimates exceed the time, the last parts are cut."""
    found, left = {}, total_s
    for name, seconds in parts.items():
        found[name] = min(max(seconds, 0.0), left) if seconds == seconds else 0.0  # not NaN
        left -= found[name]
    return {**found, "other": left}


def summed(uses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the parts of several runs together."""
    total = dict.fromkeys(PARTS, 0.0)
    for use in uses:
        for name, seconds in use.items():
            total[name] += seconds
    return total if any(total.values()) else {}


def attempt_cause(record: AttemptRecord, *, is_running: bool) -> str:
    """Return why the attempt ended, one of ``CAUSES``, or ``running`` or ``unknown``."""
    if is_running:
        return "running"
    return record.cause if record.cause in CAUSES else "unknown"
