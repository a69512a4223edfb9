"""A run's files for ``status`` and ``compare``, read once each: the layout of its step, and its times."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpc_train.errors import HpcTrainError
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.report.metrics_reader import Row, number
from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.run_status import RunStatus, run_facts

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job


@dataclass(frozen=True)
class RunFiles:
    """A run as its files were when they were read."""

    paths: RunPaths
    #: ``run.json``; empty if it can't be read.
    facts: Mapping[str, Any]
    #: In order of attempts; None: a record that can't be read.
    attempts: list[tuple[AttemptPaths, AttemptRecord | None]]

    @classmethod
    def read(cls, paths: RunPaths, *, with_events: bool = True) -> RunFiles:
        """Read the files; ``with_events``: see ``read_record``."""
        attempts = [
            (attempt, read_record(attempt, with_events=with_events)) for attempt in paths.attempt_folders()
        ]
        return cls(paths, run_facts(paths), attempts)

    @cached_property
    def experiment(self) -> Job | None:
        """The newest attempt's experiment, else the planned one; None for a damaged file."""
        from hpc_train.run import frozen_experiment  # the schema: 0.2 s, which few runs need
        from hpc_train.run.create import effective_experiment

        try:
            if not self.facts.get("changes"):
                return frozen_experiment.read(self.paths)
            return effective_experiment(self.paths, max(1, self.newest_number))
        except (HpcTrainError, OSError):
            return None

    @property
    def recorded(self) -> list[tuple[AttemptPaths, AttemptRecord]]:
        """The attempts with a readable record."""
        return [(attempt, record) for attempt, record in self.attempts if record is not None]

    @property
    def records(self) -> list[AttemptRecord]:
        """The readable records, in order of attempts."""
        return [record for _, record in self.attempts if record is not None]

    @property
    def newest_number(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return self.attempts[-1][0].number if self.attempts else 0

    @property
    def newest_record(self) -> AttemptRecord | None:
        """The record of the newest attempt; None before the first, or if it can't be read."""
        return self.attempts[-1][1] if self.attempts else None

    def is_running(self, record: AttemptRecord, now: RunStatus) -> bool:
        """Return True if the attempt with this record is running, according to the run's status."""
        return record is self.newest_record and now.state == "running"


def ranks_of(facts: Mapping[str, Any], record: AttemptRecord | None) -> int | None:
    """Return the newest attempt's ranks, else the planned ones (``facts``: run.json); None if unknown."""
    if record is not None and record.ranks is not None:
        return record.ranks
    planned = facts.get("ranks")
    return planned if type(planned) is int else None


def layout_of(run: RunFiles) -> StepLayout | None:
    """Return the layout of a step; None if the ranks or the frozen experiment are unknown."""
    ranks, planned = ranks_of(run.facts, run.newest_record), _planned(run.facts)
    if ranks is None:
        return None
    # An experiment is only read if its values matter.
    if planned and planned.ranks == ranks and planned.micro_batch_size and not run.facts.get("changes"):
        return planned
    return _from_experiment(run, ranks)


def _planned(facts: Mapping[str, Any]) -> StepLayout | None:
    noted = facts.get("step")
    if not isinstance(noted, dict):
        return None
    values: dict[str, Any] = {field.name: noted.get(field.name) for field in fields(StepLayout)}
    sizes = [values["global_batch_size"], values["micro_batch_size"], values["ranks"], values["data_ranks"]]
    if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(values["precision"], str):
        return None
    return StepLayout(**values)


def _from_experiment(run: RunFiles, ranks: int) -> StepLayout | None:
    from hpc_train.experiment.workload import workload_of
    from hpc_train.launchers.lookup import launcher_in

    experiment, record = run.experiment, run.newest_record
    if experiment is None:
        return None
    nodes = len(record.hosts) if record is not None else 0
    launcher = launcher_in(run.paths, run.facts)
    per_node = ranks // nodes if nodes else launcher.ranks(experiment, ranks).per_node or ranks
    return workload_of(experiment).step_layout(experiment, ranks, min(ranks, per_node), kept_size(run.paths))


def elapsed_s(run: RunFiles, now: RunStatus) -> float | None:
    """Return the seconds of all attempts together, without the queue; None before the first."""
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
    """Return ``data 0.4 s, compile 35.1 s (3 graphs, 0 from the cache), first run 1.2 s``, or nothing."""
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
    #: Whether the next attempt began in the same allocation, or by the same local command.
    in_place: bool
    signal_to_saved_s: float | None
    saved_to_requeue_s: float | None
    requeue_to_begin_s: float | None
    begin_to_first_step_s: float | None


def newest_restart(records: Sequence[AttemptRecord]) -> Restart | None:
    """Return the newest interruption of a run with these attempts; None if there was none.

    Without a scheduler only a restart in place counts: nothing else restarts the run.
    """
    if records and records[-1].job and records[-1].cause in COMES_BACK:
        return _between(records[-1], None)
    if len(records) > 1 and (records[-1].in_place or (records[-2].job and records[-1].job)):
        return _between(records[-2], records[-1])
    return None


def _between(before: AttemptRecord, after: AttemptRecord | None) -> Restart:
    old, new = before.events, {"begin": after.start} | after.events if after else {}
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
