"""Attempts: claimed once each, and the record of who ran one, where, and how it ended."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run_folder import checkpoints
from hpc_train.run_folder.files import read_json, sync_folder, write_json
from hpc_train.run_folder.processes import Process

#: Why an attempt ended. ``lost``: without a word, as when a node dies. ``diverged``: NaN or infinity.
CAUSES = (
    "completed", "preemption", "time limit", "interrupted", "crash", "hang", "bad node", "worker lost",
    "lost", "diverged", "user error", "cancelled",
)  # fmt: skip
#: In the order in which they come. ``begin``: the batch script runs. ``rank``: rank 0's process is there.
#: ``joined``: the process group stands. ``loaded``: model and checkpoint are there. ``first_step``: it is
#: done. ``signal``: rank 0 was asked to stop. ``agreed``: all ranks know. ``saved``: the checkpoint is
#: committed. ``end``: the batch script goes on after the ranks. ``requeue``: Slurm was asked to start anew.
EVENTS = ("begin", "rank", "joined", "loaded", "first_step", "signal", "agreed", "saved", "end", "requeue")


@dataclass(frozen=True)
class AttemptRecord:
    """``attempt.json``. What is not known yet is None."""

    attempt: int
    #: UTC, ISO 8601.
    start: str
    #: Names of the checkpoints that counted when the attempt was claimed: those it may go on from.
    checkpoints: list[str]
    #: Whoever answers for the attempt: the command that claimed it, then its launcher.
    launcher_process: Process | None
    launcher: str | None = None
    hosts: list[str] = field(default_factory=list)
    ranks: int | None = None
    #: ``--devices`` to use again.
    devices: int | None = None
    rank_processes: list[Process] = field(default_factory=list)
    end: str | None = None
    #: By rank; negative: the signal that ended it.
    exit_codes: list[int] | None = None
    reason: str | None = None
    #: On Slurm: ``A_t`` of an array's task, else the job's number; and its count of restarts.
    slurm_job: str | None = None
    restart: int | None = None
    #: Why it ended, one of ``CAUSES``.
    cause: str | None = None
    #: What happened when: UTC, ISO 8601 with milliseconds; the keys are ``EVENTS``.
    events: dict[str, str] = field(default_factory=dict)
    #: The longest save, in seconds: how early before its end the next job is told to stop.
    save_s: float | None = None
    #: What training waited for saves in all, in seconds.
    checkpoint_stall_s: float | None = None
    #: Nodes that ended the attempt, and how.
    bad_nodes: dict[str, str] = field(default_factory=dict)
    #: Step of the newest checkpoint that counted at its end, 0 without one: by whoever judged the attempt.
    saved_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"version": 1} | asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttemptRecord:
        """Raises TypeError where a required key is missing."""
        known = {key.name: data[key.name] for key in fields(cls) if key.name in data}
        ranks = known.get("rank_processes") or []
        known["rank_processes"] = [process for each in ranks if (process := Process.from_json(each))]
        known["launcher_process"] = Process.from_json(known.get("launcher_process"))
        return cls(**known)

    def ended(self, exit_codes: list[int], reason: str | None) -> AttemptRecord:
        return replace(self, end=now(), exit_codes=exit_codes, reason=reason)


def now() -> str:
    """Return the time as the run folder's files give it: UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def now_ms() -> str:
    """Return the time as events give it: UTC, ISO 8601, in milliseconds."""
    return in_ms(datetime.now(UTC).timestamp())


def in_ms(timestamp: float) -> str:
    """Return seconds since 1970 as events give a time."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")


def claim_attempt(paths: RunPaths, launcher: str | None = None, **facts: Any) -> int:
    """Make the next attempt this process's own, for ``launcher``; return its number, from 1.

    The folder appears with its record in it, in one step: of several that claim, each gets its own number.
    ``facts``: more fields of the record.
    """
    while True:
        number = newest_number(paths) + 1
        if claim_exactly(paths, number, launcher, **facts):
            return number


def claim_exactly(paths: RunPaths, number: int, launcher: str | None = None, **facts: Any) -> bool:
    """Claim attempt ``number``; False where another process has claimed it before.

    For a command that has seen that the attempt before ``number`` has ended: of several such commands one
    claims, and the others leave nothing behind.
    """
    paths.attempts.mkdir(exist_ok=True)
    listed = checkpoints.listing(paths, number)
    owner = {"launcher_process": Process.current(), "launcher": launcher}
    record = AttemptRecord(number, now(), listed, **owner | facts)
    with no_claims(paths):
        return _place(paths.attempt(number), record)


@contextmanager
def no_claims(paths: RunPaths) -> Iterator[None]:
    """Keep others from claiming an attempt meanwhile: ``clean`` removes only of a run that nobody starts.

    Waits while another command holds it. Ends with its process.
    """
    descriptor = os.open(paths.claim_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _place(attempt: AttemptPaths, record: AttemptRecord) -> bool:
    """Rename a finished folder into place; False where another, not empty, was there first."""
    temporary = AttemptPaths(attempt.folder.with_name(f".{attempt.folder.name}.{secrets.token_hex(4)}"))
    temporary.folder.mkdir()
    try:
        write_record(temporary, record)
        temporary.folder.rename(attempt.folder)
    except OSError:
        if not _is_taken(attempt.folder):
            raise
        return False
    finally:
        shutil.rmtree(temporary.folder, ignore_errors=True)
    sync_folder(attempt.folder.parent)
    return True


def _is_taken(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def newest_number(paths: RunPaths) -> int:
    """Return the number of the newest attempt, 0 before the first."""
    attempts = paths.attempt_folders()
    return attempts[-1].number if attempts else 0


def read_record(attempt: AttemptPaths) -> AttemptRecord | None:
    """Return the attempt's record with rank 0's events in it, or None where none can be read."""
    data = read_json(attempt.record)
    if data is None:
        return None
    told = read_json(attempt.events) or {}
    data |= {"attempt": attempt.number}
    data |= {"events": {**(data.get("events") or {}), **(told.get("events") or {})}}
    data |= {key: told[key] for key in ("save_s", "checkpoint_stall_s") if told.get(key) is not None}
    try:
        return AttemptRecord.from_json(data)
    except TypeError:
        return None


def write_record(attempt: AttemptPaths, record: AttemptRecord) -> None:
    write_json(attempt.record, record.to_json(), sync=True)
