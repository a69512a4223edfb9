"""Why an attempt ended and what follows: a pure judgement of what ``after`` has gathered."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpc_train.errors import ExitCode
from hpc_train.launchers.outcome import exception_line, one_line

#: A crash is requeued so often, by one job; then the run has failed.
MOST_CRASHES = 3
#: Attempts in a row that met their time limit before their first step; one more would be like them.
MOST_IDLE = 3
_FINAL = {int(ExitCode.BAD_FILE), int(ExitCode.IO)}
#: A rank that ended so has nothing to say of the cause.
_FOLLOWED = {int(ExitCode.TRY_AGAIN), int(ExitCode.PEER_LOST)}
#: srun's own, where it or the ranks were ended by the job's signals: 128 + SIGINT, SIGUSR2, SIGTERM.
_ENDED_BY_SIGNAL = {128 + 2, 128 + 12, 128 + 15}
_NODE_FAILURE = re.compile(r"node failure|due to node_?fail", re.IGNORECASE)
#: ``srun: error: n2: tasks 2-3: Exited with exit code 76``, ``… task 3: Killed``
_TASK_END = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
_BY_SIGNAL = {"Terminated", "User defined signal 2", "Interrupt"}
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
    #: Exit codes that ranks left.
    codes: dict[int, int] = field(default_factory=dict)
    #: Which signal asked rank 0 to stop.
    signal: str | None = None
    #: It came long before the time limit.
    is_early: bool = False
    #: Optimizer steps that are done.
    step: int = 0
    has_stepped: bool = True
    #: What the batch script has printed since the attempt began.
    output: str = ""
    #: The ranks that wrote a log, each with its last line.
    logs: dict[int, str] = field(default_factory=dict)
    #: This job's attempts before this one that crashed.
    crashes_before: int = 0
    #: Those right before this one that met the time limit before their first step.
    idle_before: int = 0


@dataclass(frozen=True)
class Verdict:
    """``state`` is the run's, ``cause`` the attempt's; ``exit_code`` the batch job's."""

    cause: str
    state: str
    reason: str | None
    exit_code: ExitCode

    @property
    def words(self) -> str:
        """Return what the batch script reads."""
        return f"{'requeue' if self.state == 'requeued' else 'stop'} {int(self.exit_code)}"


def judge(facts: Facts) -> Verdict:
    """Return why the attempt ended. The order counts: what is sure comes first."""
    if facts.is_completed:
        return Verdict("completed", "completed", None, ExitCode.DONE)
    if facts.is_cancelled:
        return Verdict("cancelled", "cancelled", "hpc-train cancel", ExitCode.FAILED)
    for rank, text in facts.errors.items():
        if facts.codes.get(rank) in _FINAL:
            reason = one_line("; ".join(text.splitlines()))
            return Verdict("user error", "failed", reason, ExitCode(facts.codes[rank]))
    for rank, text in facts.errors.items():
        if facts.codes.get(rank) not in _FOLLOWED:
            return _crash(facts, f"rank {rank}: {exception_line(text)}")
    if _NODE_FAILURE.search(facts.output):
        return _requeued("lost", f"a node failed at step {facts.step}")
    silent = _silent_end(facts)
    if silent is not None:
        return _crash(facts, silent)
    if _has_stopped(facts):
        return _stopped(facts)
    return _crash(facts, _last_words(facts))


def _has_stopped(facts: Facts) -> bool:
    """Tell whether the ranks ended because they were asked to."""
    if facts.codes.get(0) == ExitCode.TRY_AGAIN or facts.srun_code == ExitCode.TRY_AGAIN:
        return True  # all of them agreed, and saved
    return facts.srun_code in _ENDED_BY_SIGNAL and not facts.codes


def _stopped(facts: Facts) -> Verdict:
    if facts.signal != "SIGUSR2" or facts.is_early:
        return _requeued("preemption", f"preempted at step {facts.step}")
    if not facts.has_stepped and facts.idle_before + 1 >= MOST_IDLE:
        reason = f"the time limit was met {MOST_IDLE} times before one step was done; raise slurm.time_limit"
        return Verdict("time limit", "failed", reason, ExitCode.FAILED)
    return _requeued("time limit", f"time limit at step {facts.step}")


def _requeued(cause: str, reason: str) -> Verdict:
    return Verdict(cause, "requeued", one_line(reason), ExitCode.TRY_AGAIN)


def _crash(facts: Facts, what: str) -> Verdict:
    number = facts.crashes_before + 1
    if number <= MOST_CRASHES:
        return _requeued("crash", f"crash {number} of {MOST_CRASHES}: {what}")
    return Verdict("crash", "failed", one_line(what), ExitCode.FAILED)


def _silent_end(facts: Facts) -> str | None:
    """Return how a task ended without a word, by srun's words: killed, say. None where none did."""
    ends = list(_TASK_END.finditer(facts.output))
    silent = [end for end in ends if not _follows(end["how"])]
    # Once the ranks have agreed and saved, srun kills those that are slow to leave.
    if not silent or (facts.codes.get(0) == ExitCode.TRY_AGAIN and silent[0] is not ends[0]):
        return None
    return _described(silent[0], facts)


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
    return f"{'rank' if tasks.isdecimal() else 'ranks'} {tasks} on {end['node']}: {how}"


def _last_words(facts: Facts) -> str:
    """Return what there is to say where no rank gave a reason."""
    if facts.logs:
        if facts.srun_code == 0:
            return "the ranks ended without an error and without being done; see hpc-train logs"
        return f"no rank said why it ended (srun: exit code {facts.srun_code}); see hpc-train logs"
    complaints = _COMPLAINT.findall(facts.output)
    said = complaints[-1] if complaints else f"srun: exit code {facts.srun_code}, and it said nothing"
    return f"no rank was started: {said}"
