"""Converts srun's report to evidence of an attempt's end, and its diagnosis to the job's next action."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpc_train.errors import ExitCode
from hpc_train.recovery import diagnosis
from hpc_train.recovery.budgets import Decision
from hpc_train.run.run_status import INTERRUPTED

#: srun's exit codes if it or the ranks were ended by the job's signals: 128 + SIGINT, SIGUSR2, SIGTERM.
_ENDED_BY_SIGNAL = {128 + 2, 128 + 12, 128 + 15}
#: Of a preempted job it is ``DUE TO PREEMPTION`` (22.05 to 26.05).
_REQUEUED = re.compile(r"\*\*\* (?:JOB|STEP) .* DUE TO JOB REQUEUE \*\*\*")
#: srun or a node's daemon ended the ranks by itself; what follows are the ends of these.
_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) .* CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?|Job step aborted:")
_BY_SLURM = {"TIME LIMIT": diagnosis.Stop("time limit"), "PREEMPTION": diagnosis.Stop("preemption")}
_ENDED_BY_CANCEL = {int(signal.SIGKILL), int(signal.SIGTERM)}
_NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.+)")
_NODE_FAILURE = re.compile(r"node failure|due to node_?fail", re.IGNORECASE)
_FAILED_NODE = re.compile(r"node failure on (\S+)", re.IGNORECASE)
#: ``srun: error: n2: tasks 2-3: Exited with exit code 76``, ``… task 3: Killed``
_TASK_END = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
#: As srun 22.05 names them: by strsignal(3).
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_STOP_SIGNALS = {int(signal.SIGTERM), int(signal.SIGUSR2), int(signal.SIGINT)}
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_ ]kill|exceeded (?:\w+ )?memory limit", re.IGNORECASE)
_COMPLAINT = re.compile(r"^(?:srun|slurmstepd|hpc-train|bash|\S+/slurm_script): .+$", re.MULTILINE)
#: A complaint that states a cause, unlike those about the end that follows.
_CAUSE = re.compile(r"(?:error|fatal): (?!Timed out waiting for job step)")
MORE_MEMORY = "ask for more slurm.mem_gb"


@dataclass(frozen=True)
class Facts(diagnosis.Evidence):
    """The facts about an attempt once srun has returned; ``evidence`` adds those that follow from these."""

    srun_code: int = 0
    #: The signal by which rank 0 was asked to stop.
    signal: str | None = None
    #: It came long before the time limit.
    is_early: bool = False
    #: Output of the batch script since the attempt began.
    output: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """``state`` is the run's, ``cause`` the attempt's; ``exit_code`` the batch job's."""

    cause: str
    state: str
    reason: str | None
    exit_code: ExitCode
    #: Nodes that ended the attempt, and how.
    bad_nodes: dict[str, str] = field(default_factory=dict)

    def words(self, exclude: Mapping[str, str] | None = None, *, in_place: bool = False) -> str:
        """Return the answer for the batch script; ``exclude``: nodes that the next start should avoid."""
        if self.state != "requeued":
            return f"stop {int(self.exit_code)}"
        if in_place:
            return "again"
        return f"requeue {int(self.exit_code)} {','.join(exclude or ())}".rstrip()

    def decided(self, decision: Decision) -> Diagnosis:
        """Return the diagnosis of a run to requeue after the decision about its budget."""
        reason = diagnosis.one_line(decision.reason)
        if decision.comes_back:
            return replace(self, reason=reason)
        return replace(self, reason=reason, state="failed", exit_code=ExitCode.FAILED)


def judge(facts: Facts) -> Diagnosis:
    """Return why the attempt ended; whether a run that may be requeued is depends on its budget."""
    # srun has the exit codes of ranks whose disk was too full to record them.
    full = {end.rank: int(ExitCode.IO) for end in _task_ends(facts.output) if end.exit_code == ExitCode.IO}
    facts = replace(facts, codes={**full, **facts.codes})
    verdict = diagnosis.diagnose(evidence(facts))
    ends = {
        "completed": ("completed", ExitCode.DONE),
        "cancelled": ("cancelled", ExitCode.FAILED),
        "diverged": ("failed", ExitCode.FAILED),
    }
    state, code = ends.get(verdict.cause, ("requeued", ExitCode.TRY_AGAIN))
    if verdict.cause == "user error":
        state, code = "failed", diagnosis.exit_code_of_user_error(verdict, facts.codes)
    return Diagnosis(verdict.cause, state, verdict.reason, code, verdict.bad_nodes)


def stopped(verdict: Diagnosis, facts: Facts, stop: diagnosis.Stop | None) -> Diagnosis:
    """Return the diagnosis of a run that was asked to stop in the user's own allocation; None: it was not.

    An error of a rank remains the reason; ranks that were killed because they did not end in time have none.
    """
    own_errors = diagnosis.ranks_with_own_errors(facts.errors, facts.codes)
    if stop is None or own_errors or verdict.state != "requeued" or verdict.cause in {"hang", "bad node"}:
        return verdict
    return Diagnosis(stop.cause, "requeued", diagnosis.stop_reason(stop, facts.step), ExitCode.TRY_AGAIN)


def in_allocation(verdict: Diagnosis, run: str) -> Diagnosis:
    """Return the diagnosis of a run that would be requeued, but is in the user's own allocation."""
    if verdict.state != "requeued":
        return verdict
    resume = f"`hpc-train resume {run} --here` continues it in an allocation, without --here it is queued"
    return replace(verdict, state=INTERRUPTED, reason=diagnosis.one_line(f"{verdict.reason}; {resume}"))


def evidence(facts: Facts) -> diagnosis.Evidence:
    """Return the facts with those that the output of the batch script shows."""
    complaints = _COMPLAINT.findall(facts.output)
    complaints = [line for line in complaints if _CAUSE.search(line)] or complaints
    srun_end = f"srun: exit code {facts.srun_code}"
    has_failed_node = _NODE_FAILURE.search(facts.output)
    has_stopped = _agreed_to_stop(facts) or facts.srun_code == ExitCode.TRY_AGAIN
    has_stopped = has_stopped or (facts.srun_code in _ENDED_BY_SIGNAL and not facts.codes)
    cancelled = _cancelled(facts.output)
    by_slurm = None if cancelled is None else _BY_SLURM.get((cancelled[1] or "").strip())
    has_stopped = has_stopped or (cancelled is not None and facts.signal is not None)
    stop = stop_by(facts.signal, facts.output, is_early=facts.is_early) if has_stopped else by_slurm
    silent, logs = _silent_end(facts), facts.logs
    if silent is not None and silent.exit_code and not logs.get(silent.rank):  # Python may not have started
        causes = [line for line in complaints if not _TASK_END.match(line)]
        logs = {**logs, silent.rank: (causes or [""])[-1]}
    if cancelled is not None and facts.srun_code:
        srun_end += ", since its step was cancelled"
    return replace(
        facts,
        failed_nodes=_FAILED_NODE.findall(facts.output) if has_failed_node else None,
        logs=logs,
        silent=silent,
        unlaunched=dict(_NOT_LAUNCHED.findall(facts.output)),
        stop=stop,
        launch_end=srun_end if facts.srun_code else None,
        launch_error=complaints[-1] if complaints else f"{srun_end}, and it said nothing",
        more_memory=MORE_MEMORY,
    )


def stop_by(name: str | None, output: str = "", *, is_early: bool = False) -> diagnosis.Stop:
    """Return the reason for a stop by this signal: SIGUSR2 is the warning before the time limit.

    ``output``: of the batch script, where slurmstepd names the reason for a kill.
    """
    if _REQUEUED.search(output):
        return diagnosis.BY_HAND
    if (cancelled := _cancelled(output)) is not None and (cancelled[1] or "").strip() == "TIME LIMIT":
        return _BY_SLURM["TIME LIMIT"]
    return diagnosis.Stop("time limit" if name == "SIGUSR2" and not is_early else "preemption")


def _cancelled(output: str) -> re.Match[str] | None:
    """Return the line, before the first end of a rank, by which srun or slurmstepd reports ending them."""
    first = _TASK_END.search(output)
    return _CANCELLED.search(output, 0, first.start() if first else len(output))


def noted_stop(name: str | None, output: str) -> diagnosis.Stop | None:
    """Return ``stop_by`` of an attempt that its batch script did not diagnose; None if nobody stopped it."""
    stop = stop_by(name, output)
    return stop if name or stop == diagnosis.BY_HAND else None


def _agreed_to_stop(facts: Facts) -> bool:
    """Return True if a rank reports a stop request: rank 0 for all ranks, once they have saved.

    If there was nothing to save yet, another rank may report it: it exits alone, and the others lose a peer.
    """
    reported = {int(code) for code in _EXIT_CODE.findall(facts.output)}
    return ExitCode.TRY_AGAIN in {*facts.codes.values(), *reported}


def _silent_end(facts: Facts) -> diagnosis.SilentEnd | None:
    """Return srun's report of a task that wrote no error itself: killed, for example."""
    # The end of a rank that lost a peer may be reported before the peer's.
    ends = [
        cleaned
        for end in _task_ends(facts.output)
        if end.exit_code != ExitCode.PEER_LOST
        if (cleaned := end.without_followers(facts.logs)) is not None
    ]
    silent = [
        end for end in ends if end.signal not in _STOP_SIGNALS and end.exit_code not in diagnosis.FOLLOWED
    ]
    if _cancelled(facts.output) is not None:
        silent = [end for end in silent if end.is_out_of_memory or end.signal not in _ENDED_BY_CANCEL]
    # Once ranks exit on a stop request, srun kills the slow ones.
    if _agreed_to_stop(facts) and silent and silent[0] is not ends[0]:
        return None
    return diagnosis.first_cause(silent, facts.logs)


def reported_ranks(output: str) -> list[int]:
    """Return the ranks whose end srun reports, in order."""
    return [rank for end in _task_ends(output) for rank in end.all_ranks]


def _task_ends(output: str) -> list[diagnosis.SilentEnd]:
    return [_task_end(match, output) for match in _TASK_END.finditer(output)]


def _task_end(match: re.Match[str], output: str) -> diagnosis.SilentEnd:
    how = match["how"].partition(" (core dumped)")[0]
    code = _EXIT_CODE.match(how)
    return diagnosis.SilentEnd(
        match["tasks"],
        match["node"],
        signal=_SIGNALS.get(how),
        exit_code=int(code[1]) if code else None,
        report=how,
        is_out_of_memory=_OUT_OF_MEMORY.search(output) is not None,
    )
