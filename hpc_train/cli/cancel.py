"""``cancel``: ends runs for good, wherever they are."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from hpc_train.cli.printing import say
from hpc_train.cli.standing import by_launcher
from hpc_train.errors import ExitCode, NoSlurmError
from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import AttemptRecord, read_record
from hpc_train.run_folder.finding import find_runs, run_name
from hpc_train.run_folder.liveness import SILENT_LIMIT_S, lives, minutes, newest_record, silent_s
from hpc_train.run_folder.processes import Process
from hpc_train.run_folder.status import (
    CANCELLED,
    CANCELLED_BY,
    GOING_ON,
    current_status,
    mark_cancelled,
    read_status,
    write_status,
)

#: For ranks of this machine to save and go; then they are ended at once. Assumed.
_SAVE_LIMIT_S = 120.0
_KILL_LIMIT_S = 30.0
_POLL_S = 0.05


def cancel(words: Sequence[str]) -> ExitCode:
    """Cancel the runs that are meant; the worst of what became of them."""
    codes = [ExitCode.DONE]
    for launcher, runs in by_launcher(find_runs(words)):
        if launcher is None:
            codes += [_cancel_here(paths) for paths in runs]
            continue
        before = [read_status(paths).state for paths in runs]
        try:
            launcher.cancel(runs)
        except NoSlurmError as error:
            say(str(error))
            codes.append(error.exit_code)
            continue
        codes += [_told(paths, state) for paths, state in zip(runs, before, strict=True)]
    return max(codes)


def _told(paths: RunPaths, before: str) -> ExitCode:
    """Say how a run with a queue stands now."""
    run_id, status = run_name(paths), read_status(paths)
    if before not in GOING_ON and status.state == before:
        say(f"{run_id}: {before} already; nothing to cancel")
    elif status.state in GOING_ON:
        say(f"{run_id}: marked as cancelled; its job is not gone yet")
        return ExitCode.TRY_AGAIN
    elif status.state != "cancelled":
        say(f"{run_id}: {status.state} before it could be cancelled")
    else:
        say(f"{run_id}: cancelled at step {status.step}; `hpc-train resume {run_id}` would go on")
    return ExitCode.DONE


def _cancel_here(paths: RunPaths) -> ExitCode:
    """Cancel a run that no queue has: its ranks, if any, belong to a launcher on some machine."""
    current_status(paths)  # one whose launcher has died has ended
    before = read_status(paths).state
    if before not in GOING_ON:
        return _told(paths, before)
    record = newest_record(paths)
    if record is not None and (elsewhere := _elsewhere(paths, record)):
        say(f"{run_name(paths)}: {elsewhere}")
        return ExitCode.FAILED
    mark_cancelled(paths)  # first, so that the launcher knows why its ranks end
    if record is not None and record.end is None:
        _end_ranks(paths, record)
    status = read_status(paths)
    if status.state == "completed":
        paths.cancelled.unlink(missing_ok=True)
    elif status.state != CANCELLED:
        write_status(paths, replace(status, state=CANCELLED, reason=CANCELLED_BY))
    return _told(paths, before)


def _elsewhere(paths: RunPaths, record: AttemptRecord) -> str | None:
    """Say who alone can end the attempt, where that can't be done from here."""
    if record.launcher not in {None, "local"}:
        return f"launcher {record.launcher} has it, which can't be told to end it; end it there"
    process = record.launcher_process
    if process is None or lives(paths, record) is not None:
        return None
    seen = f"last sign of life {minutes(silent_s(paths, record))} ago"
    return (
        f"runs on {process.host} ({seen}), which is not this machine ({socket.gethostname()}) or container; "
        f"cancel it there, or here once it has been silent for {minutes(SILENT_LIMIT_S)}"
    )


def _end_ranks(paths: RunPaths, record: AttemptRecord) -> None:
    """Ask the ranks to save and go, as Ctrl-C does; end them after a while. Their launcher goes on with
    what else it was given, so that other runs of a sweep do not end with this one."""
    say(f"{run_name(paths)}: its ranks save a checkpoint and end")
    if not _end_by(signal.SIGTERM, paths, record.attempt, _SAVE_LIMIT_S):
        _end_by(signal.SIGKILL, paths, record.attempt, _KILL_LIMIT_S)


def _end_by(number: int, paths: RunPaths, attempt: int, limit_s: float) -> bool:
    """Send the signal to each rank, once it is there; return whether the attempt has ended in time."""
    deadline, told = time.monotonic() + limit_s, set[Process]()
    while time.monotonic() < deadline:
        record = read_record(paths.attempt(attempt))
        if record is None or lives(paths, record) is False:
            return True
        for rank in set(record.rank_processes) - told:
            rank.send(number, paths.folder, attempt)
            told.add(rank)
        time.sleep(_POLL_S)
    return False
