"""Limits of a QOS or an association that a single job exceeds: it is refused, or waits forever.

Called by ``request_checks``. Limits on all of a user's jobs together matter only if a single job exceeds
them. The job's request is a lower bound: values that the file does not set may be more, never less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.launchers.base import KeyProblem
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition
from hpc_train.launchers.slurm.tres_limits import Limits, Qos
from hpc_train.launchers.slurm.unsatisfiable import needed_cpus
from hpc_train.validate.slurm_rules import min_nodes

#: Resource, as limits name it → key of the file.
_KEYS = {
    "cpu": "slurm.cpus_per_gpu",
    "node": "slurm.nodes",
    "mem": "slurm.mem_gb",
    "gres/gpu": "slurm.gpus_per_node",
}
_PER_NODE = "MaxTRESPerNode"


def limit_problems(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """Yield requests that exceed a limit of the partition's QOS, the job's QOS or the association."""
    if not facts.enforces("limits"):
        return
    request, per_node = requested(slurm)
    for limits in _limits(slurm, facts, partition):
        yield from _wall(slurm, limits)
        for name, most in limits.per_job.items():
            yield from _exceeded(request, most, f"a job of {limits.owner} gets at most", name)
        prefix = f"{limits.owner} gives a node's job at most"
        yield from _exceeded(per_node, limits.per_node, prefix, _PER_NODE)


def max_submit(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> tuple[str, int] | None:
    """Return name and value of the limit on a user's jobs in the queue and running; None if unknown.

    As with other limits, a QOS overrides the association.
    """
    if not facts.enforces("limits"):
        return None
    qos = _qos_in_order(slurm, facts, partition)
    if qos is None:
        return None
    for entry in qos:
        if entry.max_submit is not None:
            return ("MaxSubmitJobsPerUser", entry.max_submit) if facts.enforces("qos") else None
    associations = facts.associations_of(slurm.account, partition.name)
    most = associations[0].max_submit if associations else None
    return None if most is None else ("MaxSubmitJobs", most)


def requested(slurm: SlurmConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return the job's minimum resources, by name: in total, and on each node."""
    per_node = {"cpu": needed_cpus(slurm)}
    if slurm.gpus_per_node:
        per_node["gres/gpu"] = slurm.gpus_per_node
        if slurm.gpu_type:
            per_node[f"gres/gpu:{slurm.gpu_type.lower()}"] = slurm.gpus_per_node
    if slurm.mem_gb is not None:
        per_node["mem"] = slurm.mem_gb * 1024
    nodes = min_nodes(slurm)
    return {name: nodes * count for name, count in per_node.items()} | {"node": nodes}, per_node


def _limits(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[Limits]:
    """Yield the limits that apply, the strongest first; a value overrides the same weaker limit."""
    qos = _qos_in_order(slurm, facts, partition)
    if qos is None:
        return
    associations = facts.associations_of(slurm.account, partition.name)
    # A QOS that is not enforced limits nothing, but may override.
    by_strength = [(source.limits, facts.enforces("qos")) for source in qos] + [
        (source.limits, True) for source in associations
    ]
    hidden_wall, hidden = False, set[tuple[str, str]]()
    for limits, is_enforced in by_strength:
        if is_enforced:
            yield _without(limits, hidden, hidden_wall=hidden_wall)
        hidden_wall = hidden_wall or limits.max_wall_s is not None
        hidden |= {(name, resource) for name, most in _by_name(limits).items() for resource in most}


def _qos_in_order(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> list[Qos] | None:
    """Return the QOS of the job and the partition, the stronger one first; None if one is unknown."""
    of_job = facts.qos_of(slurm.qos, slurm.account, partition.name)
    if of_job is None:
        return None
    if not partition.qos:
        return [of_job]
    of_partition = facts.qos_named(partition.qos)
    if of_partition is None:
        return None
    return [of_job, of_partition] if "overpartqos" in of_job.flags else [of_partition, of_job]


def _by_name(limits: Limits) -> dict[str, Mapping[str, int]]:
    return {**limits.per_job, _PER_NODE: limits.per_node}


def _without(limits: Limits, hidden: Set[tuple[str, str]], *, hidden_wall: bool) -> Limits:
    """Return the limits without the hidden pairs of name and resource."""
    remaining = {
        name: {key: count for key, count in most.items() if (name, key) not in hidden}
        for name, most in _by_name(limits).items()
    }
    per_node = remaining.pop(_PER_NODE)
    return Limits(limits.owner, None if hidden_wall else limits.max_wall_s, remaining, per_node)


def _wall(slurm: SlurmConfig, limits: Limits) -> Iterator[KeyProblem]:
    most_s = limits.max_wall_s
    if slurm.time_limit is not None and most_s is not None and slurm.time_limit * 60 > most_s:
        message = f"{slurm.time_limit} min exceed the {most_s // 60} min of {limits.owner} (MaxWall)"
        yield KeyProblem("slurm.time_limit", message, f"write at most {most_s // 60}min")


def _exceeded(
    request: Mapping[str, int], most: Mapping[str, int], prefix: str, name: str
) -> Iterator[KeyProblem]:
    for resource, count in request.items():
        if resource in most and count > most[resource]:
            key = _KEYS.get(resource, "slurm.gpus_per_node")
            unit = " MB of memory" if resource == "mem" else f" {resource}"
            message = f"the job requests {count}{unit}, but {prefix} {most[resource]} ({name})"
            yield KeyProblem(key, message, "request less, or another account or QOS")
