"""The section ``slurm`` of a new experiment file, by the partitions, nodes and limits of this cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.config.durations import format_duration
from hpc_train.config.fields import GPU_TYPE_PATTERN, SLURM_WORD_PATTERN
from hpc_train.errors import UsageError, shortened
from hpc_train.launchers.base import JobSection
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition
from hpc_train.launchers.slurm.refusals import Node

#: Shorter than most limits: a job resumes after it, and short jobs start sooner. Assumed.
_TIME_MIN = 24 * 60
_LISTED = 8
#: Cores per rank that loader processes can use. Assumed.
_CPUS_MAX = 16


def job_section(facts: ClusterFacts, name: str | None, gpus: int | None) -> JobSection:
    """Return a job of one node in this partition, or in the best one, with all GPUs of a node.

    Names that a batch script can't contain are not written. Raises UsageError if there is no such partition,
    or it has fewer GPUs.
    """
    partition = _chosen(facts, name)
    values: dict[str, str | int] = {}
    nodes = [member.node for member in facts.nodes_of(partition.name)] if partition else []
    if partition is not None and re.fullmatch(SLURM_WORD_PATTERN, partition.name):
        values["partition"] = partition.name
    values["nodes"] = 1
    kind, most = _gpus(nodes)
    if gpus is not None and gpus > most:
        label = partition.name if partition else "there is no partition, and"
        raise UsageError(f"--gpus: {gpus}, but a node of {shortened(label)} has at most {most}")
    count = most if gpus is None else gpus
    values |= _gpu_keys(kind, count, nodes)
    if partition is not None and (limit_s := partition.max_time_s):
        values["time_limit"] = format_duration(max(1, min(_TIME_MIN, limit_s // 60)))
    else:
        values["time_limit"] = format_duration(_TIME_MIN)
    if account := _account(facts):
        values["account"] = account
    return JobSection(values, max(1, count), count > 0, list(_notes(facts)))


def _chosen(facts: ClusterFacts, name: str | None) -> Partition | None:
    """Return the partition: the default one if it has GPUs or none has."""
    if name is not None:
        partition = facts.partition(name)
        if partition is None:
            names = ", ".join(shortened(candidate.name) for candidate in facts.partitions[:_LISTED])
            raise UsageError(f"--queue: there is no partition {name!r}; there are {names or 'none'}")
        return partition
    possible = [candidate for candidate in facts.partitions if candidate.is_up]
    possible.sort(key=lambda candidate: not candidate.is_default)
    with_gpus = [
        candidate
        for candidate in possible
        if _gpus([node.node for node in facts.nodes_of(candidate.name)])[1]
    ]
    return next(iter([*with_gpus, *possible]), None)


def _gpus(nodes: list[Node]) -> tuple[str, int]:
    """Return the kind of GPU of which a node has most, and their number; no kind if all are the same."""
    kinds = {kind for node in nodes for kind in node.gpus}
    counts = [(count, kind) for node in nodes for kind, count in node.gpus.items()]
    most = max(counts, default=(0, ""))
    needs_kind = len(kinds) > 1 and re.fullmatch(GPU_TYPE_PATTERN, most[1])
    return most[1] if needs_kind else "", most[0]


def _gpu_keys(kind: str, count: int, nodes: list[Node]) -> dict[str, str | int]:
    if not count:
        return {}
    keys: dict[str, str | int] = {"gpus_per_node": count}
    if kind:
        keys["gpu_type"] = kind
    fewest = min((node.cpus for node in nodes if sum(node.gpus.values()) >= count), default=count)
    total = max((sum(node.gpus.values()) for node in nodes), default=count)
    keys["cpus_per_gpu"] = max(1, min(_CPUS_MAX, fewest // max(total, 1)))
    return keys


def _account(facts: ClusterFacts) -> str | None:
    """Return the account to name, only if there are several."""
    first, *more = facts.accounts or [""]
    return first if more and re.fullmatch(SLURM_WORD_PATTERN, first) else None


def _notes(facts: ClusterFacts) -> Iterator[str]:
    """Yield one line per partition, and the accounts."""
    for partition in facts.partitions[:_LISTED]:
        nodes = [member.node for member in facts.nodes_of(partition.name)]
        _, gpus = _gpus(nodes)
        kinds = sorted({kind for node in nodes for kind in node.gpus if kind})[:_LISTED]
        limit_s = partition.max_time_s
        limit = "no time limit" if limit_s is None else f"at most {format_duration(max(1, limit_s // 60))}"
        gpu_text = f"{gpus} GPUs ({', '.join(kinds)})" if kinds else f"{gpus} GPUs"
        state = "" if partition.is_up else f", {partition.values.get('State')}"
        label = shortened(partition.name) + (" (default)" if partition.is_default else "")
        yield f"partition {label}: {len(nodes)} nodes with {gpu_text if gpus else 'no GPUs'}, {limit}{state}"
    if len(facts.partitions) > _LISTED:
        yield f"and {len(facts.partitions) - _LISTED} more partitions: sinfo"
    if facts.accounts:
        yield f"accounts: {', '.join(facts.accounts[:_LISTED])}"
