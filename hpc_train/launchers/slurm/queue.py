"""The state of jobs by squeue; for jobs that it does not list, by sacct and scontrol; else they are
forgotten.

One answer without a job proves nothing: the job may belong to another cluster (``ELSEWHERE``), or the answer
may be older than the job. So a forgotten job has the time at which it was first missed, for a second query.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.commands import Answer, RefusedError, run

#: In the queue, on no node.
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
#: States of ended jobs. Slurm requeues some automatically; they are PENDING then.
ENDED = {
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
    "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip
RUNNING = {
    "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT",
    "REVOKED",
}  # fmt: skip
#: Another cluster of the federation has started the job; this one does not know its end until it is over.
REVOKED = "REVOKED"
#: Ends after which Slurm starts a job again, unless its settings or the job's forbid that.
_REQUEUED_BY_SLURM = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
#: hpc-train's own state: slurmctld does not know the job's id, and accounting has no end of it.
FORGOTTEN = "FORGOTTEN"
#: hpc-train's own state: the job belongs to another cluster than the one queried here.
ELSEWHERE = "ELSEWHERE"
#: A job's id and its cluster; None: not recorded (0.2).
JobKey: TypeAlias = tuple[str, str | None]
#: Maximum calls of scontrol per query: it accepts one id per call.
_SHOWN_MAX = 20
#: From a job's end to its diagnosis here: the batch script's own may still be delayed by a network disk, and
#: Slurm may be about to requeue the ended job. Assumed.
_GRACE = timedelta(seconds=5)
#: A job that Slurm does not know counts as ended if it is still unknown this much later: some sites answer
#: squeue and scontrol from a cache of about half a minute. Assumed.
SECOND_LOOK_S = 60.0
#: How long a missed job is remembered until the next query.
_MISSED_MAX_S = 86400.0
#: For a status that a user waits for.
_LIMIT_S = 30.0
_SEPARATOR = "\x1f"
_SQUEUE_FIELDS = (
    "JobArrayID", "State", "Reason", "RestartCnt", "StartTime", "EndTime", "exit_code", "NodeList", "Name",
    "Command",
)  # fmt: skip
_SACCT_FIELDS = ("JobID", "State", "End", "ExitCode", "NodeList", "JobName")
_ID = re.compile(r"\d+(_\d+)?")
#: scontrol prints `not found` for a task whose array has other tasks (22.05).
_UNKNOWN = re.compile(r"invalid job id|job \d+(_\d+)? not found", re.IGNORECASE)
_TASKS = re.compile(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]")
#: Reasons of jobs that wait forever → the key that requests too much (22.05 to 26.05, read).
_NEVER = {
    "BadConstraints": "slurm",
    "PartitionConfig": "slurm",
    "PartitionNodeLimit": "slurm.nodes",
    "PartitionTimeLimit": "slurm.time_limit",
    "AccountNotAllowed": "slurm.account",
    "QOSNotAllowed": "slurm.qos",
    "MaxMemPerLimit": "slurm.mem_gb",
    "InvalidAccount": "slurm.account",
    "InvalidQOS": "slurm.qos",
    "DependencyNeverSatisfied": "slurm.dependency",
}
#: A limit of one job or one node; limits on all jobs of a user or a group pass with time.
_NEVER_BY_LIMIT = re.compile(r"(QOS|Assoc|Max)(\w*Per(Job|Node)\w*|\w*WallDuration\w*|Min\w*)")
#: A limit of all of a user's or a group's jobs together.
_SHARED_LIMIT = re.compile(r"(QOS|Assoc)\w*(Per(User|Account)|Grp)\w*")
#: 22.05: the older form of AccountNotAllowed and QOSNotAllowed.
_NOT_PERMITTED = re.compile(r"Job's (account|QOS) not permitted to use this partition")
#: Part of a limit's name → the key that requests the resource.
_KEY_BY_RESOURCE = {
    "Minutes": "slurm.time_limit",
    "Wall": "slurm.time_limit",
    "Cpu": "slurm.cpus_per_gpu",
    "Mem": "slurm.mem_gb",
    "GRES": "slurm.gpus_per_node",
    "Node": "slurm.nodes",
}
#: Commands that list a user's limits.
LIMITS_OF_QOS = "sacctmgr show qos format=name,maxwall,maxtres,maxtrespernode,maxtrespu,mintres"
LIMITS_OF_ACCOUNTS = (
    "sacctmgr show associations user=$USER format=account,maxwall,maxtres,maxtrespernode,grptres"
)
_HELD = {
    "JobHeldUser": "held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "held by an administrator, who alone can release it",
}


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array. Times: UTC, ISO 8601."""

    #: ``12``, or ``12_3``.
    job: str
    state: str
    reason: str | None = None
    #: How often it was requeued; None if unknown.
    restarts: int | None = None
    nodes: str | None = None
    #: For a waiting job: its start, or Slurm's estimate.
    start_estimate: str | None = None
    ended: str | None = None
    #: ``3:0``: the batch script's code and signal.
    exit_code: str | None = None
    name: str | None = None
    #: As passed to sbatch, followed by its arguments.
    script: str | None = None
    #: For a forgotten job: when an answer first lacked it, in seconds since 1970.
    missed_at: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue and on no node, as also after a requeue."""
        return self.state in WAITING

    @property
    def is_over(self) -> bool:
        """It has left its nodes and will not be started again."""
        return self.state in ENDED or self.state == FORGOTTEN

    @property
    def has_just_ended(self) -> bool:
        """Whether it ended within the last seconds, by clocks that may differ by as much."""
        return self.ended is not None and abs(datetime.now(UTC) - datetime.fromisoformat(self.ended)) < _GRACE

    @property
    def may_reappear(self) -> bool:
        """Whether answers have lacked it for so short a time that it may not have ended."""
        return self.missed_at is not None and time.time() - self.missed_at < SECOND_LOOK_S


def ask(
    keys: Iterable[JobKey], *, also: Iterable[JobKey] = (), max_age_s: float = commands.MAX_AGE_S
) -> dict[JobKey, JobState]:
    """Return the state of jobs; ``also``: jobs to include only if they wait or run, or have just ended.

    A job is absent if its state is unknown now, because accounting or scontrol does not answer.
    ``max_age_s``: maximum age of the answer; 0 queries again. Raises NoSchedulerError if squeue does not
    answer.
    """
    requested = set(keys)

    def is_enough(answer: Answer) -> bool:
        if "error" in answer:
            return True
        return _here(requested, answer.get("cluster")) <= set(answer["jobs"]) | set(answer["untold"])

    answer = commands.shared_answer(max_age_s, is_enough, lambda last: _ask(requested, last))
    if "error" in answer:
        raise NoSchedulerError(str(answer["error"]))
    return {key: state for key in requested | set(also) if (state := _state(key, answer)) is not None}


def _here(keys: Iterable[JobKey], cluster: str | None) -> set[str]:
    return {job for job, home in keys if None in {home, cluster} or home == cluster}


def _state(key: JobKey, answer: Answer) -> JobState | None:
    if not _here([key], answer.get("cluster")):
        return JobState(key[0], ELSEWHERE, answer["cluster"])
    facts = answer["jobs"].get(key[0])
    return None if facts is None else JobState(**facts)


def _ask(keys: set[JobKey], last: Answer | None) -> Answer:
    now, cluster = time.time(), commands.cluster_name()
    missed: dict[str, float] = dict((last or {}).get("missed") or {})
    requested = _here(keys, cluster)
    try:
        states = _squeue(f"--user={os.getuid()}")
        if missing := requested - set(states):  # another user's, visible to root or through accounting
            with suppress(RefusedError):
                states |= _squeue(f"--jobs={_numbers(missing)}")
        ended, untold = _sacct(requested - set(states))
        # Accounting has the end of each start of a job, also of one that Slurm has requeued since.
        unsure = {job for job, state in ended.items() if state.state in _REQUEUED_BY_SLURM}
        shown, unknown = _shown(requested - (set(states) | set(ended) | untold) | unsure)
        states |= {job: state for job, state in ended.items() if job in unknown or job not in unsure}
    except (NoSchedulerError, RefusedError) as error:
        # Errors are shared as well: each query takes seconds then.
        return {"error": str(error), "missed": missed, "cluster": cluster}
    states |= shown
    unknown -= set(states)
    missed = {job: at for job, at in missed.items() if job not in states and now - at < _MISSED_MAX_S}
    missed |= {job: missed.get(job, now) for job in unknown}
    states |= {job: JobState(job, FORGOTTEN, missed_at=missed[job]) for job in unknown}
    return {
        "jobs": {job: vars(state) for job, state in states.items()},
        "untold": sorted(requested - set(states)),
        "missed": missed,
        "cluster": cluster,
    }


def _shown(ids: set[str]) -> tuple[dict[str, JobState], set[str]]:
    """Return the jobs that scontrol shows, and the jobs with ids that slurmctld calls invalid.

    squeue may be outdated, since some sites cache its answers, or its output may be incomplete.
    """
    states, unknown = dict[str, JobState](), set[str]()
    for job in sorted(ids)[:_SHOWN_MAX]:
        try:
            state = _from_scontrol(job, run(["scontrol", "--oneliner", "show", "job", job], limit_s=_LIMIT_S))
        except RefusedError as error:
            unknown |= {job} if _UNKNOWN.search(error.words) else set()
        except NoSchedulerError:
            break
        else:
            states |= {} if state is None else {job: state}
    return states, unknown


def _from_scontrol(job: str, shown: str) -> JobState | None:
    """Return the job of the first line of ``scontrol show job``; None if the line is damaged."""
    facts = commands.fields(commands.job_line(shown))
    state, restarts = facts.get("JobState", ""), facts.get("Restarts", "")
    if state not in WAITING | ENDED | RUNNING:
        return None
    return JobState(
        job,
        state,
        facts.get("Reason") if facts.get("Reason") not in {"None", "(null)"} else None,
        int(restarts) if restarts.isdigit() else None,
        facts.get("NodeList") if facts.get("NodeList") != "(null)" else None,
        ended=_time(facts.get("EndTime", "")) if state in ENDED else None,
        exit_code=facts.get("ExitCode"),
        name=facts.get("JobName"),
        script=facts.get("Command"),
    )


def _numbers(ids: Iterable[str]) -> str:
    """Return the jobs' and arrays' numbers; a single task is not found while its array is one record."""
    return ",".join(sorted({job.partition("_")[0] for job in ids}, key=int))


def _squeue(selection: str) -> dict[str, JobState]:
    """Return jobs that wait, run, or ended recently enough to be in slurmctld's memory."""
    fields = ",".join(f"{field}:{_SEPARATOR}" for field in _SQUEUE_FIELDS)
    output = run(
        ["squeue", "--noheader", "--array", "--states=all", selection, f"--Format={fields}"], limit_s=_LIMIT_S
    )
    rows = (line.split(_SEPARATOR) for line in output.splitlines())
    states = [_from_squeue(row) for row in rows if len(row) > len(_SQUEUE_FIELDS) and _ID.fullmatch(row[0])]
    return {state.job: state for state in states}


def _from_squeue(row: Sequence[str]) -> JobState:
    job, state, reason, restarts, start, end, exit_code, nodes, name, script = row[: len(_SQUEUE_FIELDS)]
    return JobState(
        job,
        state,
        None if reason in {"", "None", "(null)"} else reason,
        int(restarts) if restarts.isdigit() else None,
        nodes or None,
        start_estimate=_time(start) if state in WAITING else None,
        ended=_time(end) if state in ENDED else None,
        exit_code=_exit_code(exit_code),
        name=name,
        script=script,
    )


def _exit_code(text: str) -> str:
    """Return ``code:signal``; squeue prints both as one number, like wait(2) (22.05)."""
    if not text.isdigit():
        return text
    signal = int(text) & 0x7F
    return f"0:{signal}" if signal else f"{int(text) >> 8}:0"


def _sacct(ids: set[str]) -> tuple[dict[str, JobState], set[str]]:
    """Return the jobs that have ended according to accounting, and the jobs of unknown state."""
    if not ids:
        return {}, set()
    argv = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={_numbers(ids)}"]
    try:
        output = run(
            [*argv, f"--delimiter={_SEPARATOR}", f"--format={','.join(_SACCT_FIELDS)}"], limit_s=_LIMIT_S
        )
    except commands.NoAnswerError:
        return {}, ids
    except (NoSchedulerError, RefusedError):
        return {}, set()  # a site without accounting
    rows = (line.split(_SEPARATOR) for line in output.splitlines())
    states = [state for row in rows if len(row) >= len(_SACCT_FIELDS) for state in _from_sacct(row)]
    # A job that accounting lists as running but slurmctld does not know has ended.
    ends = ENDED | {REVOKED}
    return {state.job: state for state in states if state.job in ids and state.state in ends}, set()


def _from_sacct(row: Sequence[str]) -> Iterator[JobState]:
    listed, state, end, exit_code, nodes, name = row[: len(_SACCT_FIELDS)]
    parts = state.rstrip("+").split()  # CANCELLED by 1000
    for job in _tasks(listed):
        yield JobState(
            job,
            parts[0] if parts else FORGOTTEN,
            " ".join(parts[1:]) or None,
            nodes=None if nodes == "None assigned" else nodes,
            ended=_time(end),
            exit_code=exit_code,
            name=name,
        )


def _tasks(listed: str) -> list[str]:
    """Return ``12_3`` … for ``12_[3-5,7%2]``: tasks that ended before they had separate records."""
    match = _TASKS.fullmatch(listed)
    if match is None:
        return [listed]
    ranges = [part.partition("-") for part in match[2].split(",")]
    numbers = [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
    return [f"{match[1]}_{number}" for number in numbers]


def _time(text: str) -> str | None:
    """Return Slurm's time, which is requested in UTC; None for ``N/A``, ``Unknown`` and the like."""
    if not text[:1].isdigit():
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).isoformat()
    except ValueError:
        return None


def key_at_fault(reason: str, *, is_alone: bool = False) -> str | None:
    """Return the key of the file because of which a job never starts; None for a temporary reason.

    ``is_alone``: no other job of the user runs, so that a limit per user is exceeded by this job alone.
    """
    if match := _NOT_PERMITTED.match(reason):
        return f"slurm.{match[1].lower()}"
    if _NEVER_BY_LIMIT.fullmatch(reason) or (is_alone and is_shared_limit(reason) and "PerUser" in reason):
        return requested_key(reason)
    return _NEVER.get(reason)


def requested_key(limit: str) -> str:
    """Return the key of the file that requests the resource which Slurm's name of a limit contains."""
    return next((key for part, key in _KEY_BY_RESOURCE.items() if part in limit), "slurm")


def is_shared_limit(reason: str) -> bool:
    """Return True if the reason passes once other jobs have ended, unless the job alone requests too much."""
    return _SHARED_LIMIT.fullmatch(reason) is not None


def remedy(reason: str) -> str:
    """Return the remedy for a reason of a job that never starts, or for a limit by which it is refused."""
    if reason == "DependencyNeverSatisfied":
        return "the job that it waits for has not ended as required; write another, or take it out"
    if re.match(r"(QOS|Assoc)Min", reason):
        return f"request at least the minimum, or write another slurm.qos; `{LIMITS_OF_QOS}` lists it"
    if reason.startswith("QOS"):
        return f"request less, or write another slurm.qos; `{LIMITS_OF_QOS}` lists the limits"
    if reason.startswith("Assoc"):
        return f"request less, or write another slurm.account; `{LIMITS_OF_ACCOUNTS}` lists the limits"
    if reason in {"InvalidAccount", "InvalidQOS"}:
        return "write one that `sacctmgr show associations user=$USER format=account,qos` lists"
    return "write another value, or another slurm.partition; `scontrol show partition` lists the limits"


def never_starts(reason: str) -> str | None:
    """Return text for a job that will never start; None for a temporary reason."""
    key = key_at_fault(reason)
    if key is None:
        return None
    key = "slurm.*" if key == "slurm" else key
    return f"never starts: {reason}; cancel it, then resume it with another {key}"


def waiting_words(job: JobState) -> str:
    """Return the reason for which a queued job waits."""
    if job.reason is None and job.state == "PENDING":
        return "waits: Slurm has given no reason yet"
    reason = job.reason or job.state
    if never := never_starts(reason):
        return never
    if reason in _HELD:
        return _HELD[reason].format(job=job.job)
    if "held" in reason.lower() or job.state in {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}:
        return f"held by Slurm: {reason}; `scontrol release {job.job}` lets it start"
    start = _local_time(job.start_estimate)
    if reason == "BeginTime":
        return f"starts {start}" if start else "waits: BeginTime"
    return f"waits: {reason}" + (f", starts {start} by Slurm's guess" if start else "")


def _local_time(utc: str | None) -> str | None:
    if utc is None:
        return None
    time = datetime.fromisoformat(utc).astimezone()
    is_today = time.date() == datetime.now(UTC).astimezone().date()
    return time.strftime("at %H:%M:%S" if is_today else "on %Y-%m-%d at %H:%M")
