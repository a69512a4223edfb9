"""Diagnoses the end of a local attempt from its ranks' exit codes and error files."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.launchers.rank_processes import RankProcess
from hpc_train.paths import AttemptPaths
from hpc_train.recovery import diagnosis
from hpc_train.recovery.bad_nodes import abort_line
from hpc_train.run import resource_limits
from hpc_train.run.attempts import exit_codes
from hpc_train.run.files import UnreadableFileError, read_text, tail_text
from hpc_train.run.run_status import CANCELLED, INTERRUPTED
from hpc_train.run.tracebacks import shortened_traceback

#: How a rank may end after the run is written down as completed: gloo sometimes aborts in its tear-down.
_HARMLESS_ONCE_COMPLETED = {int(ExitCode.PEER_LOST), -int(signal.SIGABRT)}
#: Exits of a rank that was asked to stop: before its handler was installed, after a lost peer, or aborted in
#: gloo's teardown.
_ASKED_TO_END = {-int(signal.SIGTERM), -int(signal.SIGINT), *_HARMLESS_ONCE_COMPLETED}
_LOG_TAIL_LINES = 14
_LOG_TAIL_BYTES = 8192
#: When C++ aborts, it prints its stack several times, with names of hundreds of characters.
_FRAMES_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """``reason`` is one line, None on success; ``details`` is the text for the user."""

    exit_code: ExitCode
    reason: str | None = None
    details: str = ""
    #: State of the run, if there is a ``reason``.
    state: str = "failed"
    #: Why the attempt ended, one of ``attempts.CAUSES``.
    cause: str = "completed"


def is_failure(code: int, is_completed: bool) -> bool:
    """Return True if a rank's exit code means that the others must end."""
    if code in {ExitCode.DONE, ExitCode.TRY_AGAIN}:
        return False
    return not (is_completed and code in _HARMLESS_ONCE_COMPLETED)


def judge(
    attempt: AttemptPaths,
    ended: Sequence[RankProcess],
    *,
    num_ranks: int,
    interrupted_by: int | None,
    is_completed: bool,
    is_cancelled: bool = False,
) -> Outcome:
    """Return how the attempt ended.

    ``ended``: the ranks that were not killed, in order of their ends. ``interrupted_by``: the signal that
    asked the launcher to stop. ``is_cancelled``: `hpc-train cancel` ended the ranks; this overrides their
    reports.
    """
    failed = [rank for rank in ended if is_failure(_code(rank), is_completed)]
    if interrupted_by is not None:
        failed = [rank for rank in failed if _code(rank) not in _ASKED_TO_END]
    stopped = [rank for rank in ended if _code(rank) == ExitCode.TRY_AGAIN and not rank.was_asked]
    if stopped and all(_code(rank) == ExitCode.PEER_LOST for rank in failed):
        failed = []  # they lost a peer that was asked to stop
    stop = None
    if not failed and interrupted_by is not None:
        stop = diagnosis.stopped_by_signal(interrupted_by)
    elif not failed and any(_code(rank) == ExitCode.TRY_AGAIN for rank in ended):
        stop = diagnosis.Stop("interrupted")
    is_whole = not failed and stop is None and len(ended) == num_ranks
    evidence = _evidence(
        attempt,
        failed,
        is_completed=is_completed or is_whole,
        is_cancelled=is_cancelled,
        stop=stop,
        stayed_behind=None if failed or not ended else (ended[0].rank, num_ranks - len(ended)),
    )
    verdict = diagnosis.diagnose(evidence)
    if verdict.cause == "completed":
        return Outcome(ExitCode.DONE)
    details = _details(attempt, verdict, evidence)
    exit_code = _exit_code(verdict, evidence, interrupted_by)
    state = verdict.cause if verdict.cause in {CANCELLED, INTERRUPTED} else "failed"
    return Outcome(exit_code, verdict.reason, details, state, verdict.cause)


def _evidence(
    attempt: AttemptPaths,
    failed: Sequence[RankProcess],
    *,
    is_completed: bool,
    is_cancelled: bool,
    stop: diagnosis.Stop | None,
    stayed_behind: tuple[int, int] | None,
) -> diagnosis.Evidence:
    ends = exit_codes(attempt)
    #: For a hung rank, which may be stopped, another rank has written the exit code and error.
    hung = [rank for rank in sorted(ends) if failed and ends[rank] == ExitCode.HUNG]
    errors = {rank: _read(attempt.error(rank)) for rank in [*(failure.rank for failure in failed), *hung]}
    errors = {rank: text for rank, text in errors.items() if text}
    logs = {rank.rank: telling_line(attempt.log(rank.rank)) for rank in failed}
    silent = [
        end
        for rank in failed
        if rank.rank not in errors and _code(rank) != ExitCode.PEER_LOST
        if (end := _silent(rank).without_followers(logs)) is not None
    ]
    # Aborts, which a lost peer may have caused, come last.
    silent.sort(key=lambda end: end.signal == signal.SIGABRT)
    return diagnosis.Evidence(
        is_completed=is_completed,
        is_cancelled=is_cancelled,
        errors=errors,
        codes=ends | {rank.rank: _code(rank) for rank in failed},
        logs=logs,
        limits=resource_limits.current(),
        silent=diagnosis.first_cause(silent, logs),
        stop=stop,
        stayed_behind=stayed_behind,
        launch_end=f"rank {failed[0].rank}: exit code {_code(failed[0])}" if failed else None,
    )


def _silent(rank: RankProcess) -> diagnosis.SilentEnd:
    code = _code(rank)
    return diagnosis.SilentEnd(
        str(rank.rank), signal=-code if code < 0 else None, exit_code=code if code > 0 else None
    )


def _code(rank: RankProcess) -> int:
    assert rank.exit_code is not None, "the rank has ended"
    return rank.exit_code


def _exit_code(
    verdict: diagnosis.Diagnosis, evidence: diagnosis.Evidence, interrupted_by: int | None
) -> ExitCode:
    if verdict.cause == "user error":
        return diagnosis.exit_code_of_user_error(verdict, evidence.codes)
    if verdict.cause == INTERRUPTED and interrupted_by is not None:
        return ExitCode.INTERRUPTED
    return ExitCode.TRY_AGAIN if verdict.cause in {CANCELLED, INTERRUPTED} else ExitCode.FAILED


def _details(attempt: AttemptPaths, verdict: diagnosis.Diagnosis, evidence: diagnosis.Evidence) -> str:
    """Return the text to show: the error if it suffices, else the user's frames or the log's end."""
    if verdict.cause in {CANCELLED, INTERRUPTED}:
        return verdict.cause
    if verdict.rank is None or verdict.cause == "diverged":
        return verdict.reason or ""
    error = evidence.errors.get(verdict.rank, "")
    if verdict.cause == "user error" and error:
        return error
    log = attempt.log(verdict.rank)
    return f"{shortened_traceback(error, log) or log_tail(log)}\n{verdict.reason}".strip()


def _read(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip()
    except (FileNotFoundError, UnreadableFileError):
        return ""


def last_line(path: Path) -> str:
    """Return the last line of a rank's log; empty if something else is in its place."""
    return next(iter(log_tail(path).strip().splitlines()[-1:]), "")


def telling_line(path: Path) -> str:
    """Return the line of a log that explains its end: a limit, a device error, a lost peer, the last one."""
    limit = resource_limits.reporting_line(log_tail(path))
    return limit or abort_line(tail_text(path, _FRAMES_BYTES)) or last_line(path)


def log_tail(path: Path) -> str:
    """Return the last lines of a rank's log; none if something else is in its place."""
    return "\n".join(tail_text(path, _LOG_TAIL_BYTES).splitlines()[-_LOG_TAIL_LINES:])
