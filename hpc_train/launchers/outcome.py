"""How a local attempt ended, read from its ranks' exit codes and error files."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ExitCode, printable
from hpc_train.launchers.rank_processes import RankProcess
from hpc_train.launchers.tracebacks import shortened_traceback
from hpc_train.paths import AttemptPaths
from hpc_train.run_folder.ends import rank_ends
from hpc_train.run_folder.files import UnreadableFileError, read_text
from hpc_train.run_folder.status import CANCELLED, CANCELLED_BY, INTERRUPTED, STOPPED_BY_CTRL_C

#: Exits with the message alone: the user's to mend, the same on every rank.
_USER_EXITS = {int(ExitCode.BAD_FILE), int(ExitCode.IO)}
#: Their errors are ours, and say all without their class.
_OWN_EXITS = {int(ExitCode.BAD_NODE), int(ExitCode.HUNG), int(ExitCode.WORKER_LOST)}
#: How a rank may end after the run is written down as completed: gloo sometimes aborts in its tear-down.
_HARMLESS_ONCE_COMPLETED = {int(ExitCode.PEER_LOST), -int(signal.SIGABRT)}
#: How a rank may end that was asked to: before it could note signals, after its peer, or in gloo's tear-down.
_ASKED_TO_END = {-int(signal.SIGTERM), -int(signal.SIGINT), *_HARMLESS_ONCE_COMPLETED}
_CAUSES = {
    int(ExitCode.BAD_FILE): "user error",
    int(ExitCode.IO): "user error",
    int(ExitCode.NO_RETRY): "diverged",
    int(ExitCode.BAD_NODE): "bad node",
    int(ExitCode.HUNG): "hang",
    int(ExitCode.WORKER_LOST): "worker lost",
}
_TRACEBACK = "Traceback (most recent call last):"
_OWN_ERROR = re.compile(r"^[\w.]*\w+Error: ")
_REASON_MAX = 500
_LOG_TAIL_LINES = 14
_LOG_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Outcome:
    """``reason`` is one line, None where all is well; ``details`` is what to show a person."""

    exit_code: ExitCode
    reason: str | None = None
    details: str = ""
    #: Of the run, where there is a ``reason``.
    state: str = "failed"
    #: Why the attempt ended, one of ``attempts.CAUSES``.
    cause: str = "completed"


def is_failure(code: int, is_completed: bool) -> bool:
    """Tell whether a rank's exit code means that the others must end."""
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

    ``ended``: the ranks that ended by themselves, first one first. ``interrupted_by``: the signal that asked
    the launcher to stop. ``is_cancelled``: `hpc-train cancel` ended the ranks, whatever else they say.
    """
    if is_cancelled and not is_completed:
        return Outcome(ExitCode.TRY_AGAIN, CANCELLED_BY, CANCELLED, CANCELLED, CANCELLED)
    failed = [rank for rank in ended if is_failure(_code(rank), is_completed)]
    if interrupted_by is not None:
        failed = [rank for rank in failed if _code(rank) not in _ASKED_TO_END]
    if failed:
        return _failure(attempt, _cause(attempt, failed))
    if is_completed:
        return Outcome(ExitCode.DONE)
    if interrupted_by is not None:
        reason = stopped_by(interrupted_by)
        return Outcome(ExitCode.INTERRUPTED, reason, INTERRUPTED, INTERRUPTED, INTERRUPTED)
    if any(_code(rank) == ExitCode.TRY_AGAIN for rank in ended):
        reason = "its ranks were asked to stop"
        return Outcome(ExitCode.TRY_AGAIN, reason, INTERRUPTED, INTERRUPTED, INTERRUPTED)
    if len(ended) < num_ranks:
        reason = f"rank {ended[0].rank}: ended, but {num_ranks - len(ended)} others did not and were killed"
        return Outcome(ExitCode.FAILED, reason, reason, cause="crash")
    return Outcome(ExitCode.DONE)


def stopped_by(number: int) -> str:
    """Return the reason of a run that a signal to its launcher interrupted."""
    return STOPPED_BY_CTRL_C if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def _code(rank: RankProcess) -> int:
    assert rank.exit_code is not None, "the rank has ended"
    return rank.exit_code


def _cause(attempt: AttemptPaths, failed: Sequence[RankProcess]) -> RankProcess:
    """Return the rank that the others' ends follow from.

    The first that did not merely lose its peer; one that gloo aborted over a peer comes after all others. Of
    those that did, the first that has words of NCCL's.
    """
    own = [rank for rank in failed if _code(rank) != ExitCode.PEER_LOST]
    spoke = [rank for rank in own if _code(rank) != -signal.SIGABRT or attempt.error(rank.rank).exists()]
    told = [rank for rank in failed if attempt.error(rank.rank).exists()]
    return (spoke or own or told or failed)[0]


def _failure(attempt: AttemptPaths, rank: RankProcess) -> Outcome:
    code = _code(rank)
    if code == ExitCode.PEER_LOST and (hung := _hung(attempt)) is not None:
        return hung
    said = _read(attempt.error(rank.rank))
    if code in _USER_EXITS and said:
        reason = one_line("; ".join(said.splitlines()))
        return Outcome(ExitCode(code), reason, said, cause="user error")
    if code == ExitCode.NO_RETRY and said:
        return Outcome(ExitCode.FAILED, one_line(own_words(said)), own_words(said), cause="diverged")
    exit_code = ExitCode(code) if code in _USER_EXITS else ExitCode.FAILED
    if code < 0:
        what = signal_reason(-code)
    elif code == ExitCode.PEER_LOST and not said:
        what = f"lost the others, and none said why; see {attempt.log(rank.rank)}"
    elif said:
        what = own_words(said) if code in _OWN_EXITS else exception_line(said)
    else:
        what = f"ended with exit code {code}; see {attempt.log(rank.rank)}"
    reason = one_line(by_rank(rank.rank, what))
    log = attempt.log(rank.rank)
    details = f"{shortened_traceback(said, log) or log_tail(log)}\n{reason}".strip()
    return Outcome(exit_code, reason, details, cause=_CAUSES.get(code, "crash"))


def _hung(attempt: AttemptPaths) -> Outcome | None:
    """Return what was said for a rank that hung: one that is stopped could not even end by itself."""
    hung = [rank for rank, end in sorted(rank_ends(attempt).items()) if end.code == ExitCode.HUNG]
    if not hung or not (said := _read(attempt.error(hung[0]))):
        return None
    return Outcome(ExitCode.FAILED, one_line(by_rank(hung[0], own_words(said))), said, cause="hang")


def by_rank(rank: int, words: str) -> str:
    return words if words.startswith("rank ") else f"rank {rank}: {words}"


def exception_line(text: str) -> str:
    """Return a traceback's own ``Type: message``, or the first line of text that is no traceback."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else lines
    return next((line for line in after if line.strip() and not line.startswith(" ")), lines[0])


def own_words(text: str) -> str:
    """Return what an error of ours says, in one line, without traceback and class."""
    line = exception_line(text) if _TRACEBACK in text else "; ".join(text.splitlines())
    return _OWN_ERROR.sub("", line)


def signal_reason(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}; out of memory? Fewer data.workers or a smaller micro_batch_size need less"
    return f"killed by {name}"


def one_line(text: str) -> str:
    """Return ``text`` as a run's reason: one line, printable, not too long."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _REASON_MAX else f"{line[: _REASON_MAX - 1]}…"


def _read(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip()
    except (FileNotFoundError, UnreadableFileError):
        return ""


def log_tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
