"""Explains why a job waits: Slurm's reason, and its meaning for the user."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from hpc_train.launchers.slurm.queue import JobState

#: Reasons of jobs that wait forever → the key that requests too much (22.05 to 26.05, read).
_NEVER = {
    "BadConstraints": "slurm.* (no node satisfies what it asks for)",
    "PartitionConfig": "slurm.*",
    "PartitionInactive": "slurm.partition",
    "PartitionNodeLimit": "slurm.nodes",
    "PartitionTimeLimit": "slurm.time_limit",
    "AccountNotAllowed": "slurm.account",
    "QOSNotAllowed": "slurm.qos",
    "InvalidAccount": "slurm.account",
    "InvalidQOS": "slurm.qos",
    "DependencyNeverSatisfied": "slurm.dependency",
}
#: A limit of one job or one node; limits on all jobs of a user or a group pass with time.
_NEVER_BY_LIMIT = re.compile(r"(QOS|Assoc|Max)(\w*Per(Job|Node)\w*|\w*WallDuration\w*|Min\w*)")
_HELD = {
    "JobHeldUser": "held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "held by an administrator",
}


def never_starts(reason: str | None) -> str | None:
    """Return text for a job that will never start; None for a temporary reason."""
    if reason is None:
        return None
    key = "slurm.*" if _NEVER_BY_LIMIT.fullmatch(reason) else _NEVER.get(reason)
    if key is None:
        return None
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
    """Return the local time, with the date if it is not today."""
    if utc is None:
        return None
    time = datetime.fromisoformat(utc).astimezone()
    is_today = time.date() == datetime.now(UTC).astimezone().date()
    return time.strftime("at %H:%M:%S" if is_today else "on %Y-%m-%d at %H:%M")
