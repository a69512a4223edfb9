"""Resources used and time lost by a run, for ``status`` of a named run: hours, time by cause, memory, CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpc_train.console import rounded
from hpc_train.launchers.base import JobUsage
from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.report.metrics_reader import Row, number
from hpc_train.report.run_times import attempt_spans, short_duration, timestamp
from hpc_train.report.time_use import evaluation_seconds, time_use

if TYPE_CHECKING:
    from hpc_train.experiment.topology.degrees import Ranks
    from hpc_train.report.run_files import RunFiles
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

    def to_json(self) -> dict[str, Any]:
        """Return ``usage`` of ``status --json``."""
        return dict(vars(self))

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


def _hours(run: RunFiles, now: RunStatus, size: Ranks | None, count: int | None) -> float | None:
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
