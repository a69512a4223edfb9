"""Diagnosis of an attempt's end: cause and reason, the same for every launcher. Pure, without a scheduler.

A launcher converts the reports of its processes or its scheduler into ``Evidence`` and calls ``diagnose``. If
the launcher could not, the attempt is diagnosed later: with ``diagnose_lost`` by the next attempt and by
``status``, or from the scheduler's report of the job.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_train.errors import ExitCode, listed, printable, shortened
from hpc_train.recovery.bad_nodes import DIED, FAILED_CHECK, UNEQUAL, is_device_error, lost_a_peer
from hpc_train.run import resource_limits
from hpc_train.run.liveness import minutes
from hpc_train.run.run_status import CANCELLED_BY, STOPPED_BY_CTRL_C

#: Exit codes of errors that would recur in every further attempt.
_FINAL = {int(ExitCode.BAD_FILE), int(ExitCode.IO), int(ExitCode.USAGE), int(ExitCode.ENVIRONMENT)}
#: The codes that also count without an error text, which a full disk can't store.
_FINAL_WITHOUT_ERROR = {int(ExitCode.BAD_FILE), int(ExitCode.IO), int(ExitCode.ENVIRONMENT)}
#: Exit codes of ranks that ended because of another rank or a stop signal.
FOLLOWED = {int(ExitCode.TRY_AGAIN), int(ExitCode.PEER_LOST)}
#: Signals for which the node may be at fault, unless memory ran out.
_NODE_SIGNALS = {int(signal.SIGKILL), int(signal.SIGSEGV), int(signal.SIGBUS)}
#: Exit code of a shell whose program was aborted.
_EXIT_OF_ABORT = 128 + int(signal.SIGABRT)
#: Signals that the kernel sends only for a limit.
_LIMIT_SIGNALS = {
    int(signal.SIGXCPU): "the limit of its CPU time is reached (`ulimit -t`)",
    int(signal.SIGXFSZ): "the limit of the size of a file is reached (`ulimit -f`)",
}
#: Reason of a run without a scheduler whose launcher could not write the end.
LAUNCHER_DIED = "launcher died"
LESS_MEMORY = "fewer data.workers or a smaller micro_batch_size need less"
_SEE_LOGS = "see hpc-train logs"
_NO_LAST_LINE = "it said nothing"
_TRACEBACK = "Traceback (most recent call last):"
_OWN_ERROR = re.compile(r"^[\w.]*\w+Error: ")
_REASON_MAX = 500


@dataclass(frozen=True)
class SilentEnd:
    """Ranks that ended without writing an error, for example by SIGKILL."""

    #: ``3``, or ``2-3`` for several ranks.
    ranks: str
    node: str | None = None
    #: The signal that ended them, or else their exit code.
    signal: int | None = None
    exit_code: int | None = None
    #: The launcher's description if it reports neither.
    report: str = "killed"
    is_out_of_memory: bool = False

    @property
    def rank(self) -> int:
        """The first of the ranks."""
        return self.all_ranks[0]

    @property
    def all_ranks(self) -> list[int]:
        """The ranks one by one."""
        spans = [part.split("-") for part in self.ranks.split(",")]
        return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]

    def without_followers(self, logs: Mapping[int, str]) -> SilentEnd | None:
        """Return the end without ranks that NCCL or gloo aborted because of a peer; None if none remain."""
        if self.signal != signal.SIGABRT and self.exit_code != _EXIT_OF_ABORT:
            return self
        ranks = [rank for rank in self.all_ranks if not lost_a_peer(logs.get(rank, ""))]
        return replace(self, ranks=",".join(map(str, ranks))) if ranks else None

    @property
    def name(self) -> str:
        """``rank 3`` or ``ranks 2-3``."""
        return f"{'rank' if self.ranks.isdecimal() else 'ranks'} {self.ranks}"

    @property
    def how(self) -> str:
        """A description of the end: a signal, an exit code, else the launcher's ``report``."""
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return self.report if self.exit_code is None else f"ended with exit code {self.exit_code}"


def first_cause(ends: Sequence[SilentEnd], logs: Mapping[int, str]) -> SilentEnd | None:
    """Return the end that explains the others: an end with a device error, else the first."""
    return min(ends, key=lambda end: not is_device_error(logs.get(end.rank, "")), default=None)


@dataclass(frozen=True)
class Stop:
    """A requested end of the ranks; ``by``: the request, if a person made it."""

    cause: str
    by: str | None = None


#: The scheduler was told to start the job again.
BY_HAND = Stop("requeue")


@dataclass(frozen=True)
class Evidence:
    """The known facts about an attempt whose ranks have ended."""

    is_completed: bool = False
    is_cancelled: bool = False
    #: Each rank's error, in the order of the errors.
    errors: Mapping[int, str] = field(default_factory=dict)
    #: Exit codes and nodes by rank, if known.
    codes: Mapping[int, int] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    #: All nodes of the attempt, and whether it is the run's first attempt.
    hosts: Sequence[str] = ()
    is_first_attempt: bool = False
    #: By started rank: the last line of its log, or the line that reports a reached limit.
    logs: Mapping[int, str] = field(default_factory=dict)
    #: The limits of the ranks' processes, from ``resource_limits.current``.
    limits: Mapping[str, str] = field(default_factory=dict)
    #: Completed optimizer steps.
    step: int = 0
    #: Nodes that failed according to the scheduler, perhaps without names; None: it reported no failure.
    failed_nodes: Sequence[str] | None = None
    #: Nodes on which the scheduler could not start ranks, with the reason.
    unlaunched: Mapping[str, str] = field(default_factory=dict)
    silent: SilentEnd | None = None
    stop: Stop | None = None
    #: A rank that ended, and the number of others that did not end and were killed.
    stayed_behind: tuple[int, int] | None = None
    #: The end of the launch; None: without an error.
    launch_end: str | None = None
    #: The reason why no rank was started.
    launch_error: str = "the reason is unknown"
    #: The remedy for a lack of memory, like ``ask for more slurm.mem_gb``.
    more_memory: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """``cause`` is one of ``run.attempts.CAUSES``; ``reason`` is one line, None for a completed run."""

    cause: str
    reason: str | None = None
    #: The rank whose error or end it is, if it is a single rank's.
    rank: int | None = None
    #: Nodes that may be at fault, with the reason.
    bad_nodes: dict[str, str] = field(default_factory=dict)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of the attempt. Certain causes are checked first."""
    if evidence.is_completed:
        return Diagnosis("completed")
    if evidence.is_cancelled:
        return Diagnosis("cancelled", CANCELLED_BY)
    diagnosis = _final(evidence) or _reported_by_a_rank(evidence)
    if diagnosis is not None:
        return diagnosis
    if evidence.failed_nodes is not None:
        reason = f"a node failed at step {evidence.step}"
        return _diagnosis("lost", reason, bad_nodes=dict.fromkeys(evidence.failed_nodes, DIED))
    if evidence.unlaunched:
        return _unlaunched(evidence)
    if evidence.silent is not None:
        return _silent(evidence, evidence.silent)
    if evidence.stop is not None:
        return _diagnosis(evidence.stop.cause, stop_reason(evidence.stop, evidence.step))
    return _unexplained(evidence)


def exit_code_of_user_error(diagnosis: Diagnosis, codes: Mapping[int, int]) -> ExitCode:
    """Return the exit code of the run's command: the rank's code, unless only launchers use that code."""
    assert diagnosis.rank is not None, "a user error is one rank's"
    code = ExitCode(codes[diagnosis.rank])
    return ExitCode.FAILED if code in {ExitCode.ENVIRONMENT, ExitCode.BAD_NODE} else code


def _diagnosis(
    cause: str, reason: str, rank: int | None = None, bad_nodes: Mapping[str, str] | None = None
) -> Diagnosis:
    blamed = {node: one_line(how) for node, how in (bad_nodes or {}).items()}
    return Diagnosis(cause, one_line(reason), rank, blamed)


def _final(evidence: Evidence) -> Diagnosis | None:
    for rank, text in evidence.errors.items():
        if evidence.codes.get(rank) in _FINAL:
            return _diagnosis("user error", "; ".join(text.splitlines()), rank)
    for rank in sorted(evidence.codes.keys() - evidence.errors.keys()):
        if (code := evidence.codes[rank]) in _FINAL_WITHOUT_ERROR:
            last = evidence.logs.get(rank) or _NO_LAST_LINE
            return _diagnosis("user error", f"rank {rank}: ended with exit code {code}: {last}", rank)
    for rank in _by_code(evidence, ExitCode.NO_RETRY):
        text = evidence.errors.get(rank) or f"rank {rank}: it would fail again; {evidence.logs.get(rank, '')}"
        return _diagnosis("diverged", error_message(text), rank)
    return None


def ranks_with_own_errors(errors: Iterable[int], codes: Mapping[int, int]) -> list[int]:
    """Return the ranks of ``errors`` without those that report only a lost peer, as NCCL does."""
    return [rank for rank in errors if codes.get(rank) not in FOLLOWED]


def _reported_by_a_rank(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of the first rank's error, or of its exit code if it could not write an error."""
    ranks = ranks_with_own_errors(evidence.errors, evidence.codes)
    for reported in (ExitCode.BAD_NODE, ExitCode.UNEQUAL, ExitCode.HUNG):
        ranks += _by_code(evidence, reported)
    if not ranks:
        return None
    rank = ranks[0]
    node, code, text = evidence.nodes.get(rank), evidence.codes.get(rank), evidence.errors.get(rank, "")
    message = error_message(text) if text else evidence.logs.get(rank) or _NO_LAST_LINE
    if code == ExitCode.BAD_NODE and _all_nodes_fail(evidence):
        reason = f"all {len(evidence.hosts)} nodes fail alike, so no single node is the cause: {message}"
        return _diagnosis("user error" if evidence.is_first_attempt else "crash", reason, rank)
    if code == ExitCode.BAD_NODE:
        how = f"{FAILED_CHECK}: {message}"
        return _diagnosis("bad node", f"{node or f'the node of rank {rank}'} {how}", rank, _on(node, how))
    if code == ExitCode.UNEQUAL:
        suspects = [evidence.nodes.get(suspect) for suspect in _by_code(evidence, ExitCode.UNEQUAL)]
        return _diagnosis("bad node", message, rank, {node: UNEQUAL for node in suspects if node})
    if code == ExitCode.WORKER_LOST:
        return _diagnosis("worker lost", _by_rank(rank, message), rank)
    if code == ExitCode.HUNG:
        return _diagnosis("hang", _by_rank(rank, message), rank, _on(node, f"rank {rank} hung"))
    reason = f"rank {rank}: {exception_line(text)}"
    return _diagnosis("crash", reason, rank, _on(node if is_device_error(text) else None, reason))


def _all_nodes_fail(evidence: Evidence) -> bool:
    failed = {evidence.nodes.get(rank) for rank in _by_code(evidence, ExitCode.BAD_NODE)}
    return len(evidence.hosts) > 1 and failed.issuperset(evidence.hosts)


def _on(node: str | None, how: str) -> dict[str, str]:
    return {} if node is None else {node: how}


def _by_code(evidence: Evidence, code: ExitCode) -> list[int]:
    """Return the ranks that ended with ``code``: ranks with errors, in their order, then the others."""
    ranks = [*evidence.errors, *sorted(evidence.codes.keys() - evidence.errors.keys())]
    return [rank for rank in ranks if evidence.codes.get(rank) == code]


def _silent(evidence: Evidence, end: SilentEnd) -> Diagnosis:
    how = end.how
    remedy = f"{evidence.more_memory}; {LESS_MEMORY}" if evidence.more_memory else LESS_MEMORY
    line = evidence.logs.get(end.rank, "")
    if limit := resource_limits.clause(line, evidence.limits, end.signal):
        how = f"{how}{f': {line}' if line else ''}{limit}"
    elif end.is_out_of_memory:
        how = f"{how}, out of memory; {remedy}"
    elif is_device_error(line):
        how = f"{how}: {line}"
    elif end.signal == signal.SIGKILL:
        how = f"{how}; out of memory? {remedy}"
    elif end.signal in _LIMIT_SIGNALS:
        how = f"{how}: {_LIMIT_SIGNALS[end.signal]}"
    elif end.signal == signal.SIGABRT and evidence.logs.get(end.rank):
        how = f"{how}: {evidence.logs[end.rank]}"
    elif end.exit_code is not None:
        how = f"{how}: {line or _NO_LAST_LINE}"
    is_broken = is_device_error(line)
    is_suspect = (end.signal in _NODE_SIGNALS or is_broken) and not (end.is_out_of_memory or limit)
    place = f" on {end.node}" if end.node else ""
    blamed = _on(end.node if is_suspect else None, f"{end.name}: {line if is_broken else end.how}")
    return _diagnosis("crash", f"{end.name}{place}: {how}", end.rank, blamed)


def _unlaunched(evidence: Evidence) -> Diagnosis:
    nodes = evidence.unlaunched
    how = f"no rank could be launched: {next(iter(nodes.values()))}"
    # The binding to cores belongs to the request.
    if "bind" in how or (len(evidence.hosts) > 1 and nodes.keys() >= set(evidence.hosts)):
        return _diagnosis("crash", f"{listed(list(nodes), 5)}: {how}")
    return _diagnosis("bad node", f"{listed(list(nodes), 5)}: {how}", bad_nodes=dict.fromkeys(nodes, how))


def _unexplained(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis if no rank gave a reason other than a lost peer."""
    if evidence.stayed_behind is not None:
        rank, others = evidence.stayed_behind
        return _diagnosis("crash", f"rank {rank}: ended, but {others} others did not and were killed")
    if evidence.errors:
        rank, text = next(iter(evidence.errors.items()))
        return _diagnosis("crash", _by_rank(rank, exception_line(text)), rank)
    if not evidence.logs:
        limit = resource_limits.clause(evidence.launch_error, evidence.limits)
        return _diagnosis("crash", f"no rank was started: {evidence.launch_error}{limit}")
    if evidence.launch_end is None:
        return _diagnosis("crash", f"the ranks ended without an error and without being done; {_SEE_LOGS}")
    hint = next((_by_rank(*log) for log in evidence.logs.items() if lost_a_peer(log[1])), _SEE_LOGS)
    return _diagnosis("crash", f"no rank said why it ended ({evidence.launch_end}); {hint}")


def stop_reason(stop: Stop, step: int) -> str:
    """Return the reason of a requested stop."""
    if stop.cause == "preemption":
        return f"preempted at step {step}"
    if stop == BY_HAND:
        return f"requeued by hand at step {step}"
    if stop.cause == "time limit":
        return f"time limit at step {step}"
    return f"stopped by {stop.by}" if stop.by else "its ranks were asked to stop"


def stopped_by_signal(number: int) -> Stop:
    """Return the stop of a run whose launcher was interrupted by a signal."""
    by = STOPPED_BY_CTRL_C.removeprefix("stopped by ")
    return Stop("interrupted", by if number == signal.SIGINT else signal_name(number))


def diagnose_lost(
    step: int,
    stop: Stop | None = None,
    *,
    has_stopped: bool = False,
    is_requeued: bool = True,
    bad_nodes: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Return the diagnosis of an attempt whose launcher ended before it could write the end.

    ``has_stopped``: the ranks saved a checkpoint and left; ``is_requeued``: the scheduler started the job
    again, otherwise the reason of the next attempt is unknown.
    """
    if stop is not None and (has_stopped or stop == BY_HAND):
        return _diagnosis(stop.cause, stop_reason(stop, step))
    if died := [node for node, how in (bad_nodes or {}).items() if how == DIED]:
        description = f"{'node' if len(died) == 1 else 'nodes'} {', '.join(died)} died"
    elif has_stopped:
        description = "preempted, or requeued by hand,"
    else:
        description = "ended without a word"
    cause = "lost" if is_requeued else "crash"
    return _diagnosis(cause, f"{description} at step {step}", bad_nodes=bad_nodes)


def silent_for(node: str, seconds: float) -> str:
    """Return the reason for a node, or a launcher's machine, that no longer writes anything."""
    return f"no sign of life from {node} for {minutes(seconds)}"


def diagnose_unexplained_job(
    job: str, how: str, *, has_begun: bool, was_requeued: bool, see: str
) -> Diagnosis:
    """Return the diagnosis of a job whose end neither its ranks nor the scheduler explain.

    ``how``: the scheduler's description in brackets, or empty; ``was_requeued``: it was to start again.
    """
    if was_requeued:
        description = "was to be requeued but ended"
    elif has_begun:
        description = "ended without a word"
    else:
        description = "ended before any rank started"
    return _diagnosis("lost", f"{f'job {job} {description} {how}'.rstrip()}; see {see}")


def _by_rank(rank: int, text: str) -> str:
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def exception_line(text: str) -> str:
    """Return the ``Type: message`` line of a traceback, or the first line of other text."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else lines
    return next((line for line in after if line.strip() and not line.startswith(" ")), lines[0])


def error_message(text: str) -> str:
    """Return the message of an error of this package in one line, without traceback and class."""
    line = exception_line(text) if _TRACEBACK in text else "; ".join(text.splitlines())
    return _OWN_ERROR.sub("", line)


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGKILL``; ``signal 40`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one_line(text: str) -> str:
    """Return ``text`` as a run's reason: one line, printable, at most 500 characters."""
    return shortened(printable(" ".join(text.split())), _REASON_MAX)
