"""Explains why a job waits: Slurm's reason, and its meaning for the user."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from hpc_train.launchers.slurm.queue import JobState

#: Reasons of jobs that wait forever → the key that requests too much (22.05 to 26.05, read).
_NEVER = {
    "BadConstraints": "slurm",
    "PartitionConfig": "slurm",
    "PartitionInactive": "slurm.partition",
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
    "Wall": "slurm.time_limit",
    "Cpu": "slurm.cpus_per_gpu",
    "Mem": "slurm.mem_gb",
    "GRES": "slurm.gpus_per_node",
    "Node": "slurm.nodes",
}
_HELD = {
    "JobHeldUser": "held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "held by an administrator",
}


def key_at_fault(reason: str, *, is_alone: bool = False) -> str | None:
    """Return the key of the file because of which a job never starts; None for a temporary reason.

    ``is_alone``: no other job of the user runs, so that a limit per user is exceeded by this job alone.
    """
    if match := _NOT_PERMITTED.match(reason):
        return f"slurm.{match[1].lower()}"
    if _NEVER_BY_LIMIT.fullmatch(reason) or (is_alone and is_shared_limit(reason) and "PerUser" in reason):
        return next((key for part, key in _KEY_BY_RESOURCE.items() if part in reason), "slurm")
    return _NEVER.get(reason)


def is_shared_limit(reason: str) -> bool:
    """Return True if the reason passes once other jobs have ended, unless the job alone requests too much."""
    return _SHARED_LIMIT.fullmatch(reason) is not None


def remedy(reason: str) -> str:
    """Return the remedy for a reason of a job that never starts."""
    if reason.startswith("QOS"):
        limits = "sacctmgr show qos format=name,maxwall,maxtres,maxtrespernode,maxtrespu,mintres"
        return f"request less, or write another slurm.qos; `{limits}` lists the limits"
    if reason.startswith("Assoc"):
        limits = "sacctmgr show associations user=$USER format=account,maxwall,maxtres,maxtrespernode,grptres"
        return f"request less, or write another slurm.account; `{limits}` lists the limits"
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
    """Return the local time, with the date if it is not today."""
    if utc is None:
        return None
    time = datetime.fromisoformat(utc).astimezone()
    is_today = time.date() == datetime.now(UTC).astimezone().date()
    return time.strftime("at %H:%M:%S" if is_today else "on %Y-%m-%d at %H:%M")
