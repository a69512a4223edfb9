"""What srun reports of an attempt's end, as evidence, and what follows for its job. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_train.errors import ExitCode
from hpc_train.recovery.budgets import Decision
from hpc_train.recovery.diagnosis import (
    FOLLOWED,
    Evidence,
    SilentEnd,
    Stop,
    diagnose,
    exit_code_of_user_error,
    first_cause,
    one_line,
)

#: srun's own, where it or the ranks were ended by the job's signals: 128 + SIGINT, SIGUSR2, SIGTERM.
_ENDED_BY_SIGNAL = {128 + 2, 128 + 12, 128 + 15}
_NODE_FAILURE = re.compile(r"node failure|due to node_?fail", re.IGNORECASE)
_FAILED_NODE = re.compile(r"node failure on (\S+)", re.IGNORECASE)
#: ``srun: error: n2: tasks 2-3: Exited with exit code 76``, ``… task 3: Killed``
_TASK_END = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
#: As srun 22.05 names them: by strsignal(3).
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_STOP_SIGNALS = {int(signal.SIGTERM), int(signal.SIGUSR2), int(signal.SIGINT)}
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_ ]kill", re.IGNORECASE)
_COMPLAINT = re.compile(r"^(?:srun|slurmstepd|hpc-train|bash|\S+/slurm_script): .+$", re.MULTILINE)
MORE_MEMORY = "ask for more slurm.mem_gb"


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
    #: All nodes of the attempt, and whether it is the run's first one.
    hosts: Sequence[str] = ()
    is_first_attempt: bool = False
    #: Which signal asked rank 0 to stop.
    signal: str | None = None
    #: It came long before the time limit.
    is_early: bool = False
    #: Optimizer steps that are done.
    step: int = 0
    #: What the batch script has printed since the attempt began.
    output: str = ""
    #: The ranks that wrote a log, each with the line that says why it ended.
    logs: dict[int, str] = field(default_factory=dict)
    #: Of the batch script, from which ranks inherit them.
    limits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """``state`` is the run's, ``cause`` the attempt's; ``exit_code`` the batch job's."""

    cause: str
    state: str
    reason: str | None
    exit_code: ExitCode
    #: Nodes that ended the attempt, and how.
    bad_nodes: dict[str, str] = field(default_factory=dict)

    def words(self, exclude: Mapping[str, str] | None = None) -> str:
        """Return what the batch script reads; ``exclude``: the nodes that the next start is to avoid."""
        if self.state != "requeued":
            return f"stop {int(self.exit_code)}"
        return f"requeue {int(self.exit_code)} {','.join(exclude or ())}".rstrip()

    def decided(self, decision: Decision) -> Diagnosis:
        """Return what becomes of a run that would be requeued, once its budget was asked."""
        reason = one_line(decision.reason)
        if decision.comes_back:
            return replace(self, reason=reason)
        return replace(self, reason=reason, state="failed", exit_code=ExitCode.FAILED)


def judge(facts: Facts) -> Diagnosis:
    """Return why the attempt ended; whether a run that may be requeued is depends on its budget."""
    facts = _with_codes_of_full_disks(facts)
    found = diagnose(evidence(facts))
    ends = {
        "completed": ("completed", ExitCode.DONE),
        "cancelled": ("cancelled", ExitCode.FAILED),
        "diverged": ("failed", ExitCode.FAILED),
    }
    state, code = ends.get(found.cause, ("requeued", ExitCode.TRY_AGAIN))
    if found.cause == "user error":
        state, code = "failed", exit_code_of_user_error(found, facts.codes)
    return Diagnosis(found.cause, state, found.reason, code, found.bad_nodes)


def _with_codes_of_full_disks(facts: Facts) -> Facts:
    """Add what srun reports of ranks whose disk had no room for their exit code."""
    ends = _task_ends(facts.output)
    found = {end.rank: int(ExitCode.IO) for end in ends if end.exit_code == ExitCode.IO}
    return replace(facts, codes=found | facts.codes)


def evidence(facts: Facts) -> Evidence:
    """Return the same without Slurm's names."""
    complaints = _COMPLAINT.findall(facts.output)
    srun_end = f"srun: exit code {facts.srun_code}"
    has_failed_node = _NODE_FAILURE.search(facts.output)
    return Evidence(
        is_completed=facts.is_completed,
        is_cancelled=facts.is_cancelled,
        errors=facts.errors,
        codes=facts.codes,
        nodes=facts.nodes,
        hosts=facts.hosts,
        is_first_attempt=facts.is_first_attempt,
        logs=facts.logs,
        limits=facts.limits,
        step=facts.step,
        failed_nodes=_FAILED_NODE.findall(facts.output) if has_failed_node else None,
        silent=_silent_end(facts),
        stop=stop_by(facts.signal, facts.is_early) if _has_stopped(facts) else None,
        launch_end=srun_end if facts.srun_code else None,
        launch_error=complaints[-1] if complaints else f"{srun_end}, and it said nothing",
        more_memory=MORE_MEMORY,
    )


def stop_by(name: str | None, is_early: bool = False) -> Stop:
    """Return why a job was asked to stop by this signal: SIGUSR2 is the warning before the time limit."""
    return Stop("time limit" if name == "SIGUSR2" and not is_early else "preemption")


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


def _silent_end(facts: Facts) -> SilentEnd | None:
    """Return srun's report of a task that wrote no error itself: killed, for example."""
    reported = _task_ends(facts.output)
    # One that lost a peer may be seen to end before the peer is.
    ends = [
        own
        for end in reported
        if end.exit_code != ExitCode.PEER_LOST
        if (own := end.without_followers(facts.logs)) is not None
    ]
    silent = [end for end in ends if end.signal not in _STOP_SIGNALS and end.exit_code not in FOLLOWED]
    # Once ranks leave because they were asked to, srun kills those that are slow to.
    if _agreed_to_stop(facts) and silent and silent[0] is not ends[0]:
        return None
    return first_cause(silent, facts.logs)


def reported_ranks(output: str) -> list[int]:
    """Return the ranks of which srun reports the end, the first one first."""
    return [rank for end in _task_ends(output) for rank in end.all_ranks]


def _task_ends(output: str) -> list[SilentEnd]:
    return [_task_end(match, output) for match in _TASK_END.finditer(output)]


def _task_end(match: re.Match[str], output: str) -> SilentEnd:
    how = match["how"].partition(" (core dumped)")[0]
    code = _EXIT_CODE.match(how)
    return SilentEnd(
        match["tasks"],
        match["node"],
        signal=_SIGNALS.get(how),
        exit_code=int(code[1]) if code else None,
        report=how,
        is_out_of_memory=_OUT_OF_MEMORY.search(output) is not None,
    )
