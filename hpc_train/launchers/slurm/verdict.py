"""Why an attempt ended and what follows: a pure judgement of what ``after`` has gathered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpc_train.errors import ExitCode
from hpc_train.launchers.outcome import by_rank, exception_line, one_line, own_words
from hpc_train.run_folder.bad_nodes import DIED, FAILED_CHECK, is_device_error
from hpc_train.run_folder.budgets import Decision

_FINAL = {int(ExitCode.BAD_FILE), int(ExitCode.IO), int(ExitCode.USAGE)}
#: A rank that ended so has nothing to say of the cause.
_FOLLOWED = {int(ExitCode.TRY_AGAIN), int(ExitCode.PEER_LOST)}
#: srun's own, where it or the ranks were ended by the job's signals: 128 + SIGINT, SIGUSR2, SIGTERM.
_ENDED_BY_SIGNAL = {128 + 2, 128 + 12, 128 + 15}
_NODE_FAILURE = re.compile(r"node failure|due to node_?fail", re.IGNORECASE)
_FAILED_NODE = re.compile(r"node failure on (\S+)", re.IGNORECASE)
#: ``srun: error: n2: tasks 2-3: Exited with exit code 76``, ``… task 3: Killed``
_TASK_END = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
_BY_SIGNAL = {"Terminated", "User defined signal 2", "Interrupt"}
#: What ends a rank whose node may be at fault, where it was not memory that ran out.
_BY_NODE = re.compile(r"Killed|Segmentation fault|Bus error")
_LESS_MEMORY = "ask for more slurm.mem_gb; fewer data.workers or a smaller micro_batch_size need less"
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_ ]kill", re.IGNORECASE)
_COMPLAINT = re.compile(r"^(?:srun|slurmstepd|hpc-train|bash|\S+/slurm_script): .+$", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """What is known of an attempt once srun has returned."""

    srun_code: int
    is_completed: bool = False
    is_cancelled: bool = False
    #: What ranks said of their own errors, the first one first.
    errors: dict[int, str] = field(default_factory=dict)
    #: Exit codes that ranks left, and the nodes that they were on.
    codes: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    #: Which signal asked rank 0 to stop.
    signal: str | None = None
    #: It came long before the time limit.
    is_early: bool = False
    #: Optimizer steps that are done.
    step: int = 0
    #: What the batch script has printed since the attempt began.
    output: str = ""
    #: The ranks that wrote a log, each with its last line.
    logs: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """``state`` is the run's, ``cause`` the attempt's; ``exit_code`` the batch job's."""

    cause: str
    state: str
    reason: str | None
    exit_code: ExitCode
    #: Nodes that ended the attempt, and how.
    bad_nodes: dict[str, str] = field(default_factory=dict)

    def words(self, leave_out: Mapping[str, str] | None = None) -> str:
        """Return what the batch script reads; ``leave_out``: the nodes that the next start is to avoid."""
        if self.state != "requeued":
            return f"stop {int(self.exit_code)}"
        return f"requeue {int(self.exit_code)} {','.join(leave_out or ())}".rstrip()

    def decided(self, decision: Decision) -> Verdict:
        """Return what becomes of a run that would come back, once its budget was asked."""
        reason = one_line(decision.reason)
        if decision.comes_back:
            return replace(self, reason=reason)
        return replace(self, reason=reason, state="failed", exit_code=ExitCode.FAILED)


def judge(facts: Facts) -> Verdict:
    """Return why the attempt ended; whether a run that may come back does is for its budget to say.

    The order counts: what is sure comes first.
    """
    if facts.is_completed:
        return Verdict("completed", "completed", None, ExitCode.DONE)
    if facts.is_cancelled:
        return Verdict("cancelled", "cancelled", "hpc-train cancel", ExitCode.FAILED)
    told = _final(facts) or _told_by_a_rank(facts)
    if told is not None:
        return told
    if _NODE_FAILURE.search(facts.output):
        return _comes_back("lost", f"a node failed at step {facts.step}", _failed_nodes(facts))
    silent = _silent_end(facts)
    if silent is not None:
        return _comes_back("crash", _described(silent, facts), _blamed(silent, facts))
    if _has_stopped(facts):
        return _stopped(facts)
    return _comes_back("crash", _last_words(facts))


def _final(facts: Facts) -> Verdict | None:
    """Return the verdict on what would be the same another time."""
    for rank, text in facts.errors.items():
        if facts.codes.get(rank) in _FINAL:
            reason = one_line("; ".join(text.splitlines()))
            return Verdict("user error", "failed", reason, ExitCode(facts.codes[rank]))
    for rank in _by_code(facts, ExitCode.NO_RETRY):
        text = facts.errors.get(rank) or f"rank {rank}: it would fail again; {facts.logs.get(rank, '')}"
        return Verdict("diverged", "failed", one_line(own_words(text)), ExitCode.FAILED)
    return None


def _told_by_a_rank(facts: Facts) -> Verdict | None:
    """Return the verdict on the first rank's own error, or exit code where it could write no error."""
    own = [rank for rank in facts.errors if facts.codes.get(rank) not in _FOLLOWED]
    own += _by_code(facts, ExitCode.BAD_NODE) + _by_code(facts, ExitCode.HUNG)
    if not own:
        return None
    rank = own[0]
    node, code, text = facts.nodes.get(rank), facts.codes.get(rank), facts.errors.get(rank, "")
    said = own_words(text) if text else facts.logs.get(rank) or "it said nothing"
    if code == ExitCode.BAD_NODE:
        how = f"{FAILED_CHECK}: {said}"
        return _comes_back("bad node", f"{node or f'the node of rank {rank}'} {how}", _on(node, how))
    if code == ExitCode.WORKER_LOST:
        return _comes_back("worker lost", by_rank(rank, said))
    if code == ExitCode.HUNG:
        return _comes_back("hang", by_rank(rank, said), _on(node, f"rank {rank} hung"))
    reason = f"rank {rank}: {exception_line(text)}"
    return _comes_back("crash", reason, _on(node if is_device_error(text) else None, reason))


def _on(node: str | None, how: str) -> dict[str, str]:
    return {} if node is None else {node: how}


def _by_code(facts: Facts, code: ExitCode) -> list[int]:
    """Return the ranks that ended with ``code``: those that said why, in their order, then the others."""
    ranks = [*facts.errors, *sorted(facts.codes.keys() - facts.errors.keys())]
    return [rank for rank in ranks if facts.codes.get(rank) == code]


def _failed_nodes(facts: Facts) -> dict[str, str]:
    return dict.fromkeys(_FAILED_NODE.findall(facts.output), DIED)


def _blamed(end: re.Match[str], facts: Facts) -> dict[str, str]:
    """Return the node of ranks that were ended without a word, unless memory is why."""
    is_suspect = _BY_NODE.match(end["how"]) and not _OUT_OF_MEMORY.search(facts.output)
    return {end["node"]: f"{_ranks(end)}: {end['how']}"} if is_suspect else {}


def _has_stopped(facts: Facts) -> bool:
    """Tell whether the ranks ended because they were asked to."""
    if _agreed_to_stop(facts) or facts.srun_code == ExitCode.TRY_AGAIN:
        return True
    return facts.srun_code in _ENDED_BY_SIGNAL and not facts.codes


def _agreed_to_stop(facts: Facts) -> bool:
    """Tell whether a rank says that it was asked to stop: rank 0 for all of them, once they have saved.

    Another rank where there was nothing to save yet: then it leaves by itself, and others lose a peer.
    """
    said = {int(code) for code in _EXIT_CODE.findall(facts.output)}
    return ExitCode.TRY_AGAIN in {*facts.codes.values(), *said}


def _stopped(facts: Facts) -> Verdict:
    if facts.signal != "SIGUSR2" or facts.is_early:
        return _comes_back("preemption", f"preempted at step {facts.step}")
    return _comes_back("time limit", f"time limit at step {facts.step}")


def _comes_back(cause: str, reason: str, bad_nodes: Mapping[str, str] | None = None) -> Verdict:
    blamed = {node: one_line(how) for node, how in (bad_nodes or {}).items()}
    return Verdict(cause, "requeued", one_line(reason), ExitCode.TRY_AGAIN, blamed)


def _silent_end(facts: Facts) -> re.Match[str] | None:
    """Return srun's words on a task that said nothing itself: killed, say. None where there is none."""
    ends = list(_TASK_END.finditer(facts.output))
    silent = [end for end in ends if not _follows(end["how"])]
    # Once ranks leave because they were asked to, srun kills those that are slow to.
    if not silent:
        return None
    # One that lost a peer may be seen to end before the peer is.
    first = next((end for end in ends if not _lost_a_peer(end["how"])), ends[0])
    return None if _agreed_to_stop(facts) and silent[0] is not first else silent[0]


def _lost_a_peer(how: str) -> bool:
    code = _EXIT_CODE.match(how)
    return code is not None and int(code[1]) == ExitCode.PEER_LOST


def _follows(how: str) -> bool:
    """Tell whether a task's end has its cause elsewhere."""
    code = _EXIT_CODE.match(how)
    return how in _BY_SIGNAL if code is None else int(code[1]) in _FOLLOWED


def _described(end: re.Match[str], facts: Facts) -> str:
    tasks, how = end["tasks"], end["how"]
    if _OUT_OF_MEMORY.search(facts.output):
        how = f"{how}, out of memory; {_LESS_MEMORY}"
    elif how == "Killed":
        how = f"{how}, out of memory? {_LESS_MEMORY}"
    elif _EXIT_CODE.match(how):
        first = int(re.findall(r"\d+", tasks)[0])
        how = f"{how}: {facts.logs.get(first) or 'it said nothing'}"
    return f"{_ranks(end)} on {end['node']}: {how}"


def _ranks(end: re.Match[str]) -> str:
    return f"{'rank' if end['tasks'].isdecimal() else 'ranks'} {end['tasks']}"


def _last_words(facts: Facts) -> str:
    """Return what there is to say where no rank gave a reason, but for what NCCL said of a lost peer."""
    if facts.errors:
        rank, text = next(iter(facts.errors.items()))
        return by_rank(rank, exception_line(text))
    if facts.logs:
        if facts.srun_code == 0:
            return "the ranks ended without an error and without being done; see hpc-train logs"
        return f"no rank said why it ended (srun: exit code {facts.srun_code}); see hpc-train logs"
    complaints = _COMPLAINT.findall(facts.output)
    said = complaints[-1] if complaints else f"srun: exit code {facts.srun_code}, and it said nothing"
    return f"no rank was started: {said}"
