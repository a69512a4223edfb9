"""Whether an attempt is still alive, and cleaning up after a dead launcher."""

from __future__ import annotations

import secrets
import signal
import time
from contextlib import suppress

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, newest_number, read_record
from hpc_train.run.processes import end_program

#: Assumed: a process in an uninterruptible write to a slow disk may take that long to end.
_KILL_LIMIT_S = 30.0
#: Twenty heartbeats. Longer than the file server stalls that an attempt survives. Assumed.
SILENT_LIMIT_S = 600.0


def living(record: AttemptRecord) -> bool | None:
    """Return True if the attempt's launcher is alive; None if this machine can't determine it."""
    if record.end is not None or record.launcher_process is None:
        return False
    return record.launcher_process.is_alive()


def lives(paths: RunPaths, record: AttemptRecord) -> bool | None:
    """Return True if the attempt still runs: ``living``, except after a long silence of another machine.

    A machine, container or host name may no longer exist and never answer. Continuing without it is safe: an
    attempt owns the run, so later commits of an older one do not count. An attempt of a launcher plug-in, or
    on Slurm, may wait in a queue, during which silence means nothing.
    """
    is_living = living(record)
    if is_living is None and record.launcher in {None, "local"} and silent_s(paths, record) > SILENT_LIMIT_S:
        return False
    return is_living


def silent_s(paths: RunPaths, record: AttemptRecord) -> float:
    """Return the seconds since the attempt last wrote any of its files (a heartbeat every 30 s)."""
    attempt = paths.attempt(record.attempt)
    newest = 0.0
    for path in [paths.status, *attempt.folder.iterdir()]:
        with suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return _clock(paths) - newest


def minutes(seconds: float) -> str:
    """Return ``12 min``, or hours or days for long times."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 3600:.0f} h" if seconds >= 2 * 3600 else f"{max(0.0, seconds) / 60:.0f} min"


def _clock(paths: RunPaths) -> float:
    """Return the time of the clock that stamps the run's files: a file server's may differ from ours."""
    probe = paths.folder / f".clock.{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:  # another user's run
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def newest_record(paths: RunPaths) -> AttemptRecord | None:
    """Return the record of the newest attempt, or None before the first."""
    newest = newest_number(paths)
    return read_record(paths.attempt(newest)) if newest else None


def end_living(paths: RunPaths, *, take_over: bool = False) -> AttemptRecord | None:
    """Make sure that no rank of the newest attempt writes any more, before another attempt begins.

    Returns its record if its launcher is alive or, on another machine, may be alive: then nothing was done
    and no attempt may begin. With ``take_over`` an attempt may begin if this machine can't determine it.
    Ranks that outlived their launcher are killed; a process named in the record is only killed if its own
    environment identifies it as such a rank. Raises TryAgainError if a rank does not end.
    """
    record = newest_record(paths)
    if record is None:
        return None
    is_living = lives(paths, record)
    if is_living or (is_living is None and not take_over):
        return record
    number = newest_number(paths)
    end_program(paths.folder, number)
    sent = {rank: rank.send(signal.SIGKILL, paths.folder, number) for rank in record.rank_processes}
    for process in (rank for rank, was_sent in sent.items() if was_sent):
        process.wait(_KILL_LIMIT_S)
    return None
