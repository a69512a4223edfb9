"""Attempts: each is claimed by one process and has a record of its process, place and termination reason.

Rank 0 writes the times of its events to a file of its own, which is read with the record. Each rank writes
how it ended, ``rank-<r>.exit`` and ``rank-<r>.error``, for the process that judges the attempt.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run import checkpoints, files
from hpc_train.run.file_shapes import JSON_KEY, Time, decoded, encoded
from hpc_train.run.processes import Process

#: Why an attempt ended. ``requeue``: ``scontrol requeue``. ``lost``: without a record, as when a node dies.
#: ``diverged``: NaN or infinity.
CAUSES = (
    "completed", "preemption", "requeue", "time limit", "interrupted", "crash", "hang", "bad node",
    "worker lost", "lost", "diverged", "user error", "cancelled",
)  # fmt: skip
#: In chronological order. ``begin``: the batch script runs. ``rank``: rank 0's process is running.
#: ``joined``: the process group is formed. ``loaded``: model and checkpoint are loaded. ``first_step``: the
#: first step is done. ``signal``: rank 0 received the request to stop. ``agreed``: all ranks know. ``saved``:
#: the checkpoint is committed. ``end``: the batch script continues after the ranks, or its next start gives
#: up the run. ``requeue``: the requeue was requested from Slurm.
EVENTS = ("begin", "rank", "joined", "loaded", "first_step", "signal", "agreed", "saved", "end", "requeue")

#: Keys of rank 0's file of events that belong to the attempt's record, too.
_MEASURED = ("save_s", "checkpoint_stall_s", "first_step", "save_interval")


@dataclass(frozen=True)
class AttemptRecord:
    """``attempt.json``. Unknown values are None."""

    attempt: int
    #: UTC, ISO 8601.
    start: Time
    #: Names of the checkpoints that were valid when the attempt was claimed, from which it may resume.
    checkpoints: list[str]
    #: The process responsible for the attempt: the command that claimed it, then its launcher.
    launcher_process: Process | None
    launcher: str | None = None
    hosts: list[str] = field(default_factory=list)
    ranks: int | None = None
    #: ``--devices``, to be used again.
    devices: int | None = None
    rank_processes: list[Process] = field(default_factory=list)
    #: Nodes of the job on which no rank runs (``slurm.spare_nodes``).
    spare_hosts: list[str] = field(default_factory=list)
    end: Time | None = None
    #: Exit code per rank; negative: the signal that ended it.
    exit_codes: list[int] | None = None
    reason: str | None = None
    #: The scheduler's job id (on Slurm ``A_t`` for an array's task) and how often the job was started again.
    job: str | None = field(default=None, metadata={JSON_KEY: "slurm_job"})
    restart: int | None = None
    #: Whether it began in the allocation of the attempt before, without a requeue.
    in_place: bool = False
    #: The cluster that the job belongs to: job ids are unique within one only. None: not recorded (0.2).
    cluster: str | None = None
    #: The scheduler's time limit of the job at its start, in seconds, and the requested one if it is longer.
    time_limit_s: float | None = None
    requested_limit_s: float | None = None
    #: How long before that limit ranks stop, if the scheduler's warning comes too early for the limit.
    lead_s: float | None = None
    #: Why it ended, one of ``CAUSES``.
    cause: str | None = None
    #: When each of ``EVENTS`` happened: UTC, ISO 8601 with milliseconds.
    events: dict[str, str] = field(default_factory=dict)
    #: The longest save, in seconds: determines how early before its end the next job is signalled to stop.
    save_s: float | None = None
    #: Total time that training waited for saves, in seconds.
    checkpoint_stall_s: float | None = None
    #: Parts of the time of rank 0's first step: ``data_s``, ``compile_s``, ``run_s``; and ``graphs``, of
    #: which ``cached_graphs`` were compiled by an earlier attempt or another rank. Empty before its end.
    first_step: dict[str, float] = field(default_factory=dict)
    #: With ``checkpoint.every: auto``: the interval and its measurements, see ``recovery.save_interval``.
    save_interval: dict[str, float] = field(default_factory=dict)
    #: Nodes that ended the attempt, and how.
    bad_nodes: dict[str, str] = field(default_factory=dict)
    #: Step of the newest valid checkpoint at its end, 0 without one: set by the process that judged it.
    saved_step: int | None = None
    #: Step of its first row of metrics, for a program that has its own checkpoints; set likewise.
    first_row: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``attempt.json``."""
        return {"version": 1} | encoded(self)

    def ended(self, exit_codes: list[int], reason: str | None) -> AttemptRecord:
        """Return a copy with the end of the attempt filled in."""
        return replace(self, end=now(), exit_codes=exit_codes, reason=reason)


@dataclass(frozen=True)
class Events:
    """Rank 0's ``events.json``, whose values belong to the attempt's record, too; see there."""

    events: dict[str, str] = field(default_factory=dict)
    save_s: float | None = None
    checkpoint_stall_s: float | None = None
    first_step: dict[str, float] = field(default_factory=dict)
    save_interval: dict[str, float] = field(default_factory=dict)
    #: Name of the signal that rank 0 received.
    signal: str | None = None


def read_events(attempt: AttemptPaths) -> Events:
    """Return the attempt's events, without any if they can't be read."""
    return decoded(Events, files.read_json(attempt.events)) or _NO_EVENTS


_NO_EVENTS = Events()


def job_ids(facts: Mapping[str, Any]) -> list[str]:
    """Return the ids of a run's jobs, the newest last, by the content of its ``run.json``."""
    return [str(job) for job in facts.get("slurm_job_ids") or []]


def job_cluster(facts: Mapping[str, Any]) -> str | None:
    """Return the cluster of a run's newest job; None if it was not recorded (0.2)."""
    number, clusters = len(job_ids(facts)), facts.get("slurm_clusters") or []
    return clusters[number - 1] if 0 < number <= len(clusters) else None


def add_job(facts: dict[str, Any], job: str, cluster: str | None) -> dict[str, Any]:
    """Return ``run.json`` with the job as the newest one; unchanged if it is the newest already."""
    jobs = job_ids(facts)
    if jobs[-1:] == [job] and job_cluster(facts) in {cluster, None}:
        return facts
    clusters = [*(facts.get("slurm_clusters") or []), *([None] * len(jobs))][: len(jobs)]
    return facts | {"slurm_job_ids": [*jobs, job], "slurm_clusters": [*clusters, cluster]}


def now() -> str:
    """Return the time in the format of the run folder's files: UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def now_ms() -> str:
    """Return the time in the format of events: UTC, ISO 8601, in milliseconds."""
    return in_ms(datetime.now(UTC).timestamp())


def in_ms(timestamp: float) -> str:
    """Return a time in seconds since 1970 in the format of events."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")


def claim_attempt(paths: RunPaths, launcher: str | None = None, **facts: Any) -> int:
    """Claim the next attempt for this process and ``launcher``; return its number, from 1.

    The folder and its record are created atomically: each of several processes that claim at the same time
    gets its own number. ``facts``: more fields of the record.
    """
    while True:
        number = newest_number(paths) + 1
        if claim_exactly(paths, number, launcher, **facts):
            return number


def claim_exactly(paths: RunPaths, number: int, launcher: str | None = None, **facts: Any) -> bool:
    """Claim attempt ``number``; False if another process has claimed it before.

    For a command that has seen the end of the previous attempt: one of several such commands claims the
    attempt, and the others leave no files.
    """
    paths.attempts.mkdir(exist_ok=True)
    listed = checkpoints.listing(paths, number)
    owner = {"launcher_process": Process.current(), "launcher": launcher}
    record = AttemptRecord(number, now(), listed, **owner | facts)
    with no_claims(paths):
        return files.create_folder(
            paths.attempt(number).folder, lambda folder: write_record(AttemptPaths(folder), record)
        )


@contextmanager
def no_claims(paths: RunPaths) -> Iterator[None]:
    """Keep other commands from claiming an attempt within this context: ``clean`` may only remove files of a
    run that no other command starts.

    Waits while another command holds the lock. The lock ends with its process.
    """
    descriptor = os.open(paths.claim_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def newest_number(paths: RunPaths) -> int:
    """Return the number of the newest attempt, 0 before the first."""
    attempts = paths.attempt_folders()
    return attempts[-1].number if attempts else 0


def read_record(attempt: AttemptPaths, *, with_events: bool = True) -> AttemptRecord | None:
    """Return the attempt's record including rank 0's events; None if it can't be read.

    Without ``with_events``, the file of events is not read; enough for the attempt's process, start and end.
    """
    record = decoded(AttemptRecord, files.read_json(attempt.record))
    if record is None:
        return None
    noted = read_events(attempt) if with_events else _NO_EVENTS
    if noted is _NO_EVENTS and record.attempt == attempt.number:
        return record
    measured = {key: value for key in _MEASURED if (value := getattr(noted, key))}
    events = {**record.events, **noted.events}
    return replace(record, attempt=attempt.number, events=events, **measured)


def write_record(attempt: AttemptPaths, record: AttemptRecord) -> None:
    """Replace ``attempt.json`` atomically."""
    files.write_json(attempt.record, record.to_json(), sync=True)


@dataclass
class EventLog:
    """Rank 0's record of one attempt. Errors in writing an event are ignored."""

    attempt: AttemptPaths
    #: Parts of the first step's time, see ``AttemptRecord``; written with the next event.
    first_step: dict[str, float] = field(default_factory=dict)
    #: The interval of ``checkpoint.every: auto``, see ``AttemptRecord``; written with the next event.
    save_interval: dict[str, float] = field(default_factory=dict)
    _events: dict[str, str] = field(default_factory=dict)
    _save_s: float | None = None
    _stall_s: float = 0.0
    _signal: str | None = None

    def note(self, event: str, time: str | None = None) -> None:
        """Record that ``event`` happened, at ``time`` (UTC, ISO 8601) or now. Only the first time counts.

        If ranks agree to stop before this rank received a signal, the signal came to another rank.
        """
        assert event in EVENTS, event
        if event == "agreed":
            self._events.setdefault("signal", time or now_ms())
        if event not in self._events:
            self._events[event] = time or now_ms()
            self._write()

    def signalled(self, name: str, time: str) -> None:
        """Record the signal that requested the stop, and its time."""
        self._signal = self._signal or name
        self._events.setdefault("signal", time)
        self._write()

    def saved(self, duration_s: float, stall_s: float) -> None:
        """Record the longest save, and add ``stall_s`` to the total time that training waited for saves."""
        self._save_s = max(round(duration_s, 3), self._save_s or 0.0)
        self._stall_s += stall_s
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            facts = {"events": self._events, "save_s": self._save_s, "signal": self._signal}
            stall = {"checkpoint_stall_s": round(self._stall_s, 4)} if self._save_s is not None else {}
            parts = {"first_step": self.first_step, "save_interval": self.save_interval}
            measured = {name: values for name, values in parts.items() if values}
            files.write_json(self.attempt.events, {"version": 1} | facts | stall | measured)


def noted_signal(attempt: AttemptPaths) -> str | None:
    """Return the name of the signal that stopped rank 0, or None."""
    return read_events(attempt).signal


#: An exit code and a node's name.
_MAX_END_BYTES = 1000


@dataclass(frozen=True)
class RankEnd:
    """A rank's exit code and its node, if known."""

    code: int
    node: str | None = None


def tell_end(attempt: AttemptPaths, rank: int, code: int, node: str | None = None) -> None:
    """Write the exit code for the process that judges the attempt from another node. Never raises."""
    if code == ExitCode.DONE:
        return
    with suppress(OSError):
        files.write_text(attempt.exit(rank), f"{code} {node or ''}".rstrip() + "\n")


def tell_error(attempt: AttemptPaths, rank: int, text: str) -> None:
    """Write the rank's error. Raises OSError for errors of the disk."""
    files.write_text(attempt.error(rank), text.rstrip() + "\n")


def rank_ends(attempt: AttemptPaths) -> dict[int, RankEnd]:
    """Return the exit code and node by rank; a rank killed by a signal has none."""
    ends = {}
    for rank, path in attempt.files_of_ranks(".exit").items():
        code, _, node = _read(path).partition(" ")
        if code.isdecimal() and len(code) <= 3:
            ends[rank] = RankEnd(int(code), node.strip() or None)
    return ends


def exit_codes(attempt: AttemptPaths) -> dict[int, int]:
    """Return the exit codes by rank."""
    return {rank: end.code for rank, end in rank_ends(attempt).items()}


def _read(path: Path) -> str:
    with suppress(FileNotFoundError, files.UnreadableFileError):
        return files.read_text(path, _MAX_END_BYTES, errors="replace").strip()
    return ""
