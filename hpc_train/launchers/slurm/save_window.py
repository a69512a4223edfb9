"""Checks, at submit, that a save fits into the time between Slurm's signal and the kill."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_train.errors import NoSchedulerError
from hpc_train.experiment.config.schema import Job
from hpc_train.launchers.slurm import commands, options
from hpc_train.paths import ExperimentPaths

#: From the signal to the end of the current step. Assumed; longer steps need more.
STEP_RESERVE_S = 5
SAVES = 3


def warnings(experiment: Job, folder: ExperimentPaths) -> list[str]:
    """Return warnings about saves that took longer than the available time; empty before the first save.

    ``experiment``: with its profile's settings.
    """
    saves = options.saves_s(folder)
    if experiment.slurm is None or not saves:
        return []
    longest_s = max(saves)
    by_partition = [_preemption(name, longest_s) for name in (experiment.slurm.partition or "").split(",")]
    return [warning for warning in (*by_partition, _time_limit(experiment, folder, longest_s)) if warning]


def _preemption(partition: str, longest_s: float) -> str | None:
    try:
        name, grace_s = preemption_grace(partition)
    except (NoSchedulerError, commands.RefusedError):
        return None  # the job is submitted nevertheless
    if grace_s is None or grace_s >= needed_s(longest_s):
        return None
    return (
        f"a job of partition {name} that is preempted has {grace_s} s, but the longest save so far took "
        f"{longest_s:.1f} s; a step, and maybe another save, must end before. Else the last checkpoint is "
        "what counts: write a smaller checkpoint.every_min"
    )


def needed_s(longest_s: float) -> float:
    """Return how long a job needs from preemption's signal to its end, by its longest save."""
    # A save under way is finished before the last one begins.
    return 2 * longest_s + STEP_RESERVE_S


def preemption_grace(partition: str) -> tuple[str, int | None]:
    """Return the partition's name (empty: the default's) and the seconds from preemption to the kill.

    None if its jobs are not preempted, or the partition does not determine the time.
    """
    values = commands.partition(partition)
    return values.get("PartitionName", partition), grace_s_of(values, commands.config())


def grace_s_of(partition: Mapping[str, str], config: Mapping[str, str]) -> int | None:
    """Return ``preemption_grace``'s seconds from the settings of the partition and of Slurm."""
    mode = partition.get("PreemptMode") or config.get("PreemptMode", "OFF")
    if config.get("PreemptType", "preempt/none") != "preempt/partition_prio" or mode.startswith("OFF"):
        return None
    # Without a grace SIGTERM is followed by SIGKILL as at scancel.
    return _seconds(partition.get("GraceTime")) or _seconds(config.get("KillWait"))


def _seconds(text: str | None) -> int | None:
    number = (text or "").split()[:1]
    return int(number[0]) if number and number[0].isdecimal() else None


def _time_limit(experiment: Job, folder: ExperimentPaths, longest_s: float) -> str | None:
    slurm, needed_s = experiment.slurm, SAVES * longest_s
    assert slurm is not None
    lead_s = options.lead_s(experiment, folder)
    if lead_s >= needed_s:
        return None
    key = "slurm.time_limit" if slurm.signal_lead_s is None else "slurm.signal_lead_s"
    return (
        f"the last save begins {lead_s} s before the time limit, but the longest so far took "
        f"{longest_s:.1f} s; raise {key}, so that three fit in"
    )
