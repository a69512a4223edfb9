"""Resources used and time lost by a run: hours, time by cause (the first is goodput), memory, CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from hpc_train.console import rounded
from hpc_train.launchers.base import JobUsage
from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.report.metrics_reader import Row, number, rows_in
from hpc_train.report.run_files import attempt_spans, short_duration, timestamp
from hpc_train.run.attempts import CAUSES
from hpc_train.run.checkpoints import INHERITED

if TYPE_CHECKING:
    from hpc_train.experiment.topology.degrees import Ranks
    from hpc_train.paths import RunPaths
    from hpc_train.report.run_files import RunFiles
    from hpc_train.run.attempts import AttemptRecord
    from hpc_train.run.run_status import RunStatus

#: Bytes of ``metrics.jsonl`` that are read for a long run, about 20,000 rows: other rows are assumed to be
#: similar.
MAX_BYTES = 4 << 20
#: Part of the time → its label. ``training`` is the part that goodput counts, ``queue`` is not allocated.
_LOST = {
    "queue": "queue",
    "starting": "starts",
    "lost": "repeated steps",
    "stopping": "stopping",
    "saving": "saves",
    "evaluation": "evaluation",
    "data": "data wait",
    "other": "other",
}


@dataclass(frozen=True)
class Usage:
    """``usage`` of ``status --json``. None: unknown."""

    gpu_hours: float | None
    core_hours: float | None
    #: Seconds by cause: those of ``time_use.PARTS``, ``evaluation`` and ``queue``.
    time: dict[str, float] = field(default_factory=dict)
    #: Maximum over devices, by the run's own rows.
    peak_gpu_memory_gib: float | None = None
    #: By the scheduler's accounting.
    peak_memory_gib: float | None = None
    requested_memory_gib: float | None = None
    memory_efficiency: float | None = None
    cpu_efficiency: float | None = None

    def details(self) -> list[tuple[str, str]]:
        """Return label and text of each line; a text is empty if nothing is known."""
        hours = [
            f"{rounded(value)} {unit}"
            for value, unit in ((self.gpu_hours, "GPU-hours"), (self.core_hours, "core-hours"))
            if value
        ]
        lost = [f"{_LOST[part]} {short_duration(self.time.get(part))}" for part in _LOST
                if self.time.get(part, 0.0) >= 0.5]  # fmt: skip
        gpu, peak = self.peak_gpu_memory_gib, self.peak_memory_gib
        lines = [] if gpu is None else [f"peak {gpu:.3g} GiB on a GPU"]
        if peak is not None:
            requested, share = self.requested_memory_gib, self.memory_efficiency
            of = "" if requested is None else f", {share:.0%} of the {requested:.3g} GiB requested"
            lines.append(f"peak {peak:.3g} GiB on a node{of}")
        return [
            ("used", ", ".join(hours[:1])),
            ("time lost", ", ".join(lost)),
            ("memory", ", ".join(lines)),
            ("CPU", "" if self.cpu_efficiency is None else f"{self.cpu_efficiency:.0%} of the cores' time"),
        ]


def usage_of(
    run: RunFiles,
    now: RunStatus,
    rows: Sequence[Row],
    share: float,
    size: Ranks | None,
    job: JobUsage | None,
) -> Usage | None:
    """Return the run's usage; None before its first attempt.

    ``rows``: the part ``share`` of its metric rows (``spread_rows``). ``size``: its size if its launcher
    started it now. ``job``: the scheduler's accounting, if there is any.
    """
    if not run.recorded:
        return None
    parts = time_use(run, now, rows)
    evaluation_s = min(sum(evaluation_seconds(rows)) / share, parts.get("other", 0.0))
    if parts:
        parts = parts | {"evaluation": evaluation_s, "other": parts["other"] - evaluation_s}
    job = job or JobUsage()
    peak, requested = job.peak_memory_gib, job.requested_memory_gib
    return Usage(
        gpu_hours=_hours(run, now, size, None if size is None else size.gpus),
        core_hours=_hours(run, now, size, None if size is None else size.cores),
        time={name: round(seconds, 1) for name, seconds in (parts | {"queue": _queue_s(run)}).items()},
        peak_gpu_memory_gib=max(
            filter(None, (number(row.get("peak_memory_gib")) for row in rows)), default=None
        ),
        peak_memory_gib=peak,
        requested_memory_gib=requested,
        memory_efficiency=None if peak is None or not requested else round(peak / requested, 4),
        cpu_efficiency=None if job.cpu_efficiency is None else round(job.cpu_efficiency, 4),
    )


def _hours(run: RunFiles, now: RunStatus, size: Ranks | None, count: float | None) -> float | None:
    """Return hours × GPUs, or cores, of all attempts; ``count``: of an attempt with all planned ranks."""
    if size is None or count is None or not size.most:
        return None
    total = 0.0
    for record, (start, end) in attempt_spans(run, now):
        total += (end - start) / 3600 * count * (record.ranks or size.most) / size.most
    return round(total, 4)


def _queue_s(run: RunFiles) -> float:
    """Return the seconds in the queue: before the first attempt, and between an attempt and its requeue."""
    records = run.records
    if not records or records[0].job is None:
        return 0.0
    waits = [(run.facts.get("created"), records[0].start)]
    for before, after in pairwise(records):
        if before.job == after.job and before.cause in COMES_BACK:
            waits.append((before.end, after.start))
    return sum(_seconds(begin, end) for begin, end in waits)


def _seconds(begin: object, end: str) -> float:
    first, last = timestamp(begin if isinstance(begin, str) else None), timestamp(end)
    return 0.0 if first is None or last is None else max(0.0, last - first)


def counts_by_state(states: Sequence[str]) -> str:
    """Return ``6 runs: 4 completed, 1 running, 1 failed``."""
    counts = Counter(states).most_common()
    listed = ", ".join(f"{count} {state}" for state, count in counts)
    return f"{len(states)} run{'s' * (len(states) != 1)}: {listed}"


class StepSeconds(NamedTuple):
    """The seconds of steps, divided into waits for data and the rest."""

    useful: float
    waited: float


def goodput(
    paths: RunPaths, now: RunStatus, elapsed_s: float | None, rows: Iterable[Row] | None = None
) -> float | None:
    """Return useful seconds divided by ``elapsed_s``, the seconds of all attempts together; None if unknown.

    ``rows``: all of ``metrics.jsonl``, which is read if omitted. It contains each step once, even if a step
    was repeated.
    """
    if not elapsed_s:
        return None
    try:
        seconds = step_seconds(rows_in(paths.metrics) if rows is None else rows, counted_steps(paths, now))
    except OSError:  # the other facts of the run are still shown
        return None
    return None if seconds is None else min(seconds.useful / elapsed_s, 1.0)


def counted_steps(paths: RunPaths, now: RunStatus) -> int:
    """Return the number of useful steps: for a run that has stopped early, the steps in a checkpoint."""
    if now.state in ("running", "completed"):
        return now.step
    saved = paths.checkpoint_folders()
    return saved[-1].step if saved else 0


def step_seconds(rows: Iterable[Row], num_steps: int) -> StepSeconds | None:
    """Return the seconds of the first ``num_steps`` steps; None if no row has a time.

    An attempt's first row has no time: its steps are assumed to take as long as those of the next row that
    has one, and steps after the last row as long as those of that row. So starting and compiling do not
    count.
    """
    useful = waited = 0.0
    step_s: float | None = None
    wait_s = 0.0
    done = untimed = 0
    for row in rows:
        step = row.get("step")
        if row.get("split") != "train" or type(step) is not int or step <= done:
            continue
        if row.get("attempt") == INHERITED:  # steps of the run that this one extends
            done = step
            continue
        untimed += min(step, num_steps) - min(done, num_steps)
        done = step
        if (seconds := number(row.get("step_s"))) is not None:
            step_s, wait_s = seconds, number(row.get("data_wait_s")) or 0.0
            useful, waited = useful + untimed * max(0.0, step_s - wait_s), waited + untimed * wait_s
            untimed = 0
    if step_s is None:
        return None
    untimed += max(0, num_steps - done)
    return StepSeconds(useful + untimed * max(0.0, step_s - wait_s), waited + untimed * wait_s)


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
    times: dict[int, float] = {}
    for row in rows:
        attempt, time = row.get("attempt"), number(row.get("time"))
        if type(attempt) is int and time is not None:
            times[attempt] = time
    return times


def evaluation_seconds(rows: Iterable[Row]) -> list[float]:
    """Return the duration of each evaluation: from the previous row to its own, minus the steps between.

    Evaluations at the same step, such as the evaluation of the averaged weights, run one after the other.
    """
    durations: list[float] = []
    step_s, before = 0.0, None
    for row in rows:
        step, time = row.get("step"), number(row.get("time"))
        step_s = number(row.get("step_s")) or step_s
        if type(step) is not int or time is None or number(step) is None or row.get("attempt") == INHERITED:
            continue
        if row.get("split") == "val" and before is not None and row.get("attempt") == before[2]:
            durations.append(max(0.0, time - before[0] - (step - before[1]) * step_s))
        before = time, step, row.get("attempt")
    return durations


def _within(total_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts and the rest of the time; if estimates exceed the time, the last parts are cut."""
    shares, left = {}, total_s
    for name, seconds in parts.items():
        shares[name] = min(max(seconds, 0.0), left) if seconds == seconds else 0.0  # not NaN
        left -= shares[name]
    return {**shares, "other": left}


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
