"""Decides whether a run resumes automatically, from the ``recovery`` limits and one job's attempts.

Pure functions of the attempts' records. Called by ``after`` for an attempt that it diagnoses, by ``begin``
for an attempt that ended without a diagnosis, and by ``status`` for the remaining limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from hpc_train.console import rounded
from hpc_train.errors import counted
from hpc_train.experiment.config.problems import Problem
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.file_shapes import Count, decoded

if TYPE_CHECKING:  # the schema takes 0.2 s, which few ends of attempts need
    from hpc_train.experiment.config.schema import Job, RecoveryConfig

#: Causes that count towards ``max_crashes``.
CRASHES = {"crash", "hang", "bad node", "worker lost"}
#: The crash after which the job is requeued only once, regardless of ``max_crashes``: memory seldom grows.
_ONCE = "worker lost"
#: Causes that count towards ``max_preemptions``.
PREEMPTIONS = {"preemption", "time limit"}
#: Causes after which another attempt may follow, within the limits.
COMES_BACK = CRASHES | PREEMPTIONS | {"lost", "requeue"}
_CHECKPOINT = "step-"
#: Failures in a row without a new checkpoint after which the job goes back to the queue (``restart: auto``).
_MAX_QUICK_FAILURES = 2
#: Consecutive starts that may be preempted before their first step. Assumed: enough on clusters with frequent
#: preemption; beyond it, something else sends the signal.
MAX_EARLY_PREEMPTIONS = 10
#: The limits of a run's ``recovery`` section, read by this module and ``bad_nodes``.
Limits: TypeAlias = "RecoveryConfig | ResolvedLimits"


#: The bounds of ``fields.Hours``, whose module takes too long to import here.
_Hours = Annotated[float, lambda hours: 0 <= hours <= 1_000_000]


@dataclass(frozen=True)
class ResolvedLimits:
    """The limits of ``RecoveryConfig`` with all defaults, as in ``resolved.json``."""

    max_preemptions: Count | None
    max_crashes: Count
    max_without_progress: Count
    exclude_nodes_for_h: _Hours
    restart: Annotated[str, {"auto", "in_place", "requeue"}.__contains__]

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> ResolvedLimits | None:
        """Return the limits of a section that hpc-train wrote; None if a value is missing or invalid."""
        return decoded(cls, section) if section.keys() >= cls.__annotations__.keys() else None


@dataclass(frozen=True)
class Left:
    """Numbers of further ends of each kind after which the job is requeued; None: unlimited."""

    crashes_left: int
    preemptions_left: int | None
    without_progress_left: int


@dataclass(frozen=True)
class GpuHours:
    """The GPU-hours that all attempts of a run have used, and the budget."""

    used: float
    budget: float
    #: The key of the budget.
    key: str


@dataclass(frozen=True)
class Decision:
    """``reason``: the used part of the limit, or why no further attempt follows."""

    comes_back: bool
    reason: str


def decide(records: Sequence[AttemptRecord], recovery: Limits, gpu_hours: GpuHours | None = None) -> Decision:
    """Decide whether another attempt follows the last of ``records``, which belong to one job, in order.

    The ``cause`` of the last record is one of ``COMES_BACK``; its ``reason`` has no counts. ``gpu_hours``:
    None without a budget.
    """
    decision = _decided(records, recovery)
    if gpu_hours is None or not decision.comes_back or gpu_hours.used < gpu_hours.budget:
        return decision
    used = f"{rounded(gpu_hours.used)} of {rounded(gpu_hours.budget)} GPU-hours are used"
    return Decision(
        False, f"{decision.reason}; {used}, so it is not requeued; raise {gpu_hours.key} to continue"
    )


def _decided(records: Sequence[AttemptRecord], recovery: Limits) -> Decision:
    last = records[-1]
    text = last.reason or f"{last.cause}: the reason is unknown"
    if last.cause in CRASHES:
        spent = num_crashes(records)
        has_been = last.cause == _ONCE and any(record.cause == _ONCE for record in records[:-1])
        if spent > recovery.max_crashes or has_been:
            return Decision(False, text)
        text = f"crash {spent} of {recovery.max_crashes}: {text}"
    if last.cause in PREEMPTIONS and recovery.max_preemptions is not None:
        spent = num_preemptions(records)
        if spent > recovery.max_preemptions:
            more = f"raise recovery.max_preemptions ({recovery.max_preemptions}) to continue"
            return Decision(False, f"{text}, once more than it may be; {more}")
        text = f"preemption {spent} of {recovery.max_preemptions}: {text}"
    return _with_progress(records, recovery, text)


def may_stay(records: Sequence[AttemptRecord], recovery: Limits, *, has_other_nodes: bool = False) -> bool:
    """Return True if the attempt after the last of ``records`` may begin in the same allocation.

    With ``restart: auto`` it may not after two failures in a row without a new checkpoint: other nodes may
    help, unless the allocation ``has_other_nodes``. Without them, the job of a lost node is requeued.
    """
    if recovery.restart == "requeue":
        return False
    if has_other_nodes:
        return records[-1].cause in CRASHES | {"lost"}
    if records[-1].cause not in CRASHES:
        return False
    failures = takewhile(lambda one: one.cause in CRASHES and not has_progressed(one), reversed(records))
    return recovery.restart == "in_place" or len(list(failures)) < _MAX_QUICK_FAILURES


def _with_progress(records: Sequence[AttemptRecord], recovery: Limits, text: str) -> Decision:
    if (starts := num_early_preemptions(records)) > MAX_EARLY_PREEMPTIONS:
        return Decision(False, f"{text}; {starts} starts in a row were preempted before their first step")
    repeats, most = num_repeats(records), recovery.max_without_progress
    if not is_idle(records[-1]) and not repeats:
        return Decision(True, text)
    spent = repeats or num_idle(records)
    why = (
        f"it began with step {records[-1].first_row} again" if repeats else f"no checkpoint {_since(records)}"
    )
    if spent <= most:
        return Decision(True, f"{text}; no progress {spent} of {most}: {why}")
    stuck = f"no progress in {counted(spent, 'attempt')}: {why}"
    longer = "raise slurm.time_limit"
    if records[-1].requested_limit_s is not None:
        longer = "submit to a partition or QOS that grants the time limit"
    more_often = "write a smaller checkpoint.every_min"
    if repeats:
        more_often = "have the program save more often and resume (program.resume)"
    advice = f"{longer} or {more_often}"
    return Decision(False, f"{stuck}; the last one: {records[-1].reason or records[-1].cause}; {advice}")


def left(records: Sequence[AttemptRecord], recovery: Limits) -> Left:
    """Return the remaining limits after one job's attempts."""
    most = recovery.max_preemptions
    preemptions = None if most is None else max(0, most - num_preemptions(records))
    idle = max(0, recovery.max_without_progress - (num_repeats(records) or num_idle(records)))
    return Left(max(0, recovery.max_crashes - num_crashes(records)), preemptions, idle)


def gpu_hours_of(records: Sequence[AttemptRecord], gpus_per_node: float) -> float:
    """Return the GPU-hours of attempts: each occupies the GPUs of its nodes from its start to its end,
    spare nodes included.

    Attempts without a job, which run on the user's machine, do not count.
    """
    jobs = [record for record in records if record.job is not None]
    return sum(
        (len(record.hosts) + len(record.spare_hosts)) * gpus_per_node * _hours(record) for record in jobs
    )


def spent_budget(experiment: Job, records: Sequence[AttemptRecord]) -> Problem | None:
    """Return the problem if a run's attempts have used all GPU-hours that its file allows."""
    slurm = experiment.slurm
    if slurm is None or slurm.max_gpu_hours is None or not slurm.gpus_per_node:
        return None
    used = gpu_hours_of(records, slurm.gpus_per_node / slurm.runs_per_gpu)
    if used < slurm.max_gpu_hours:
        return None
    message = f"{slurm.max_gpu_hours:g} GPU-hours are used up: the run's attempts took {rounded(used)}"
    return Problem(("slurm", "max_gpu_hours"), message, "raise it to continue", code="budget.spent")


def _hours(record: AttemptRecord) -> float:
    try:
        lasted = datetime.fromisoformat(record.end or "") - datetime.fromisoformat(record.start)
    except (TypeError, ValueError):
        return 0.0  # still running, or a damaged record
    return max(0.0, lasted.total_seconds() / 3600)


def num_crashes(records: Sequence[AttemptRecord]) -> int:
    """Return the number of attempts that count as crashes."""
    return sum(record.cause in CRASHES for record in records)


def num_preemptions(records: Sequence[AttemptRecord]) -> int:
    """Return the number of attempts that count as preemptions."""
    return sum(record.cause in PREEMPTIONS for record in records)


def num_idle(records: Sequence[AttemptRecord]) -> int:
    """Return the number of consecutive attempts without progress, up to the last."""
    count = 0
    for record in reversed(records):
        if has_progressed(record):
            break
        count += is_idle(record)
    return count


def num_repeats(records: Sequence[AttemptRecord]) -> int:
    """Return the number of consecutive time limits, up to the last, that a program reached from the same step
    as the time limit before, or from an earlier one: it had saved nothing from which it resumes.
    """
    if not records or records[-1].cause != "time limit" or records[-1].first_row is None:
        return 0
    limits = [record for record in records if record.cause == "time limit"]
    begins = [record.first_row for record in limits if record.first_row is not None]
    return len(list(takewhile(bool, (begins[i] <= begins[i - 1] for i in range(len(begins) - 1, 0, -1)))))


def num_early_preemptions(records: Sequence[AttemptRecord]) -> int:
    """Return the number of consecutive attempts, up to the last, preempted before their first step."""
    is_early = [record.cause == "preemption" and "first_step" not in record.events for record in records]
    return len(list(takewhile(bool, reversed(is_early))))


def is_idle(record: AttemptRecord) -> bool:
    """Return True if the attempt had time to save a checkpoint but made no progress.

    A preemption before the first step counts neither way, nor does a crash, which has its own limit. An
    attempt that took down its node counts, because Slurm would requeue it without end.
    """
    if record.cause in CRASHES or record.saved_step is None or has_progressed(record):
        return False
    took_its_node = record.cause == "lost" and bool(record.bad_nodes)
    return "first_step" in record.events or record.cause == "time limit" or took_its_node


def has_progressed(record: AttemptRecord) -> bool:
    """Return True if the attempt saved a checkpoint beyond the one from which it began."""
    return record.saved_step is not None and record.saved_step > began_at(record)


def began_at(record: AttemptRecord) -> int:
    """Return the step of the newest checkpoint from which the attempt could resume; 0 without one."""
    steps = [name.removeprefix(_CHECKPOINT) for name in record.checkpoints]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _since(records: Sequence[AttemptRecord]) -> str:
    step = began_at(records[-1])
    return f"beyond step {step}" if step else "at all"
