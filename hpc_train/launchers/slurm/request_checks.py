"""Rules for requests that Slurm refuses, or accepts and never starts: one function per rule.

``plan`` and ``submit`` refuse such a file before they create files; ``doctor`` reports the same problems.
With EnforcePartLimits=NO, Slurm's default, most of these jobs are accepted and held forever, so they are
detected from Slurm's configuration, not by sbatch. All of it is in the ``ClusterFacts``.

Temporary conditions, such as a partition that is down or drained nodes, are not problems: jobs wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.launchers.base import KeyProblem
from hpc_train.launchers.slurm import unsatisfiable
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition
from hpc_train.launchers.slurm.job_limits import limit_problems
from hpc_train.launchers.slurm.node_names import expanded
from hpc_train.validate.slurm_rules import max_nodes, min_nodes

#: The user's defaults of sbatch, which apply to keys that the file does not set (``script.job_environment``).
_DEFAULTS = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
    "reservation": "SBATCH_RESERVATION",
}
_LISTED = 8


def problems(slurm: SlurmConfig, facts: ClusterFacts) -> list[KeyProblem]:
    """Return why Slurm would refuse a job with this section, or never start it; empty if it may start.

    ``slurm``: with its profile's settings. If there are several partitions, one that fits is enough.
    """
    slurm = with_defaults(slurm)
    messages = list(partition_names(slurm, facts))
    if messages:
        return messages
    messages += [*accounts(slurm, facts), *reservation(slurm, facts), *node_names(slurm, facts)]
    by_partition = [list(_in_partition(slurm, facts, partition)) for partition in used(slurm, facts)]
    if by_partition and all(by_partition):
        messages += by_partition[0]
    return list(dict.fromkeys(messages))


def with_defaults(slurm: SlurmConfig) -> SlurmConfig:
    """Return the section with the user's defaults of sbatch for keys that it does not set."""
    defaults = {key: os.environ[name] for key, name in _DEFAULTS.items() if os.environ.get(name)}
    return slurm.model_copy(update={key: value for key, value in defaults.items() if not getattr(slurm, key)})


def used(slurm: SlurmConfig, facts: ClusterFacts) -> list[Partition]:
    """Return the partitions in which the job may start; the default one if the file names none."""
    names = (slurm.partition or "").split(",")
    partitions = [facts.partition(name) if name else facts.default for name in names]
    return [partition for partition in partitions if partition is not None]


def partition_names(slurm: SlurmConfig, facts: ClusterFacts) -> Iterator[KeyProblem]:
    """Each partition exists."""
    if not facts.partitions:
        return  # nothing is known
    names = ", ".join(partition.name for partition in facts.partitions[:_LISTED])
    for name in (slurm.partition or "").split(","):
        if name and facts.partition(name) is None:
            yield KeyProblem("slurm.partition", f"there is no partition {name}", f"write one of {names}")
    if not slurm.partition and facts.default is None:
        message = "is not given, and this cluster has no default partition"
        yield KeyProblem("slurm.partition", message, f"write one of {names}")


def accounts(slurm: SlurmConfig, facts: ClusterFacts) -> Iterator[KeyProblem]:
    """The account is one of the user's."""
    if facts.associations is None or not facts.enforces("associations"):
        return
    names = list(dict.fromkeys(association.account for association in facts.associations))
    if not names:
        message = f"you have no account (AccountingStorageEnforce = {facts.text('AccountingStorageEnforce')})"
        yield KeyProblem("slurm.account", message, "ask the administrators for an association")
    elif slurm.account is not None and slurm.account.lower() not in names:
        message = f"{slurm.account} is not an account of yours"
        yield KeyProblem("slurm.account", message, f"write one of {', '.join(names[:_LISTED])}")


def qos(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """Each quality of service exists, and the account may use it."""
    if not facts.qos or not facts.enforces("qos"):
        return
    associations = facts.associations_of(slurm.account, partition.name)
    allowed = list(dict.fromkeys(name for item in associations for name in item.qos))
    # ``+name`` and ``-name`` change the account's set, which is not listed.
    is_listed = bool(allowed) and not any(name[:1] in "+-" for name in allowed)
    for name in filter(None, (slurm.qos or "").split(",")):
        if facts.qos_named(name.lower()) is None:
            names = ", ".join(item.name for item in facts.qos[:_LISTED])
            yield KeyProblem("slurm.qos", f"there is no QOS {name}", f"write one of {names}")
        elif is_listed and name.lower() not in allowed:
            message = f"account {slurm.account or associations[0].account} may not use QOS {name}"
            yield KeyProblem("slurm.qos", message, f"write one of {', '.join(allowed[:_LISTED])}")


def reservation(slurm: SlurmConfig, facts: ClusterFacts) -> Iterator[KeyProblem]:
    """Each reservation exists."""
    for name in (slurm.reservation or "").split(","):
        if name and facts.reservations is not None and name not in facts.reservations:
            names = ", ".join(facts.reservations[:_LISTED])
            remedy = f"write one of {names}" if names else "take it out: there are none now"
            yield KeyProblem("slurm.reservation", f"there is no reservation {name}", remedy)


def node_names(slurm: SlurmConfig, facts: ClusterFacts) -> Iterator[KeyProblem]:
    """Nodes that the file names exist."""
    existing = set(facts.node_names or ())
    if not existing and all(map(facts.lists_all_nodes, facts.partitions)):
        existing = {node.name for node in facts.nodes}
    for key, value in (("exclude", slurm.exclude), ("extra.nodelist", slurm.extra.get("nodelist"))):
        unknown = [name for name in expanded(str(value or "")) if name not in existing]
        if unknown and existing:
            message = f"there is no node {unknown[0]}"
            yield KeyProblem(f"slurm.{key}", message, "write names that `scontrol show node` lists")


def _in_partition(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    if partition.is_replaced:
        return  # the job goes to another partition
    yield from qos(slurm, facts, partition)
    yield from partition_access(slurm, facts, partition)
    yield from time_limit(slurm, facts, partition)
    yield from node_counts(slurm, facts, partition)
    yield from node_sizes(slurm, facts, partition)
    yield from limit_problems(slurm, facts, partition)


def partition_access(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """The partition accepts jobs, including jobs of this account and QOS."""
    name = partition.name
    if partition.refuses_jobs:
        message = f"partition {name} takes no jobs (State = {partition.values['State']})"
        yield KeyProblem("slurm.partition", message, "submit to another partition, or wait until it is up")
    if partition.values.get("ReqResv") == "YES" and not slurm.reservation:
        message = f"is missing: partition {name} takes only jobs with a reservation"
        yield KeyProblem("slurm.reservation", message, "write it, or submit to another partition")
    associations = facts.associations_of(slurm.account, name)
    account = slurm.account or next((association.account for association in associations), None)
    # Newer versions also accept children of AllowAccounts; whether the account is one is unknown.
    if facts.enforces("associations") and partition.listed("AllowAccounts") is None:
        yield from _denied("account", account, partition.listed("DenyAccounts"), partition)
    of_job = facts.qos_of(slurm.qos, slurm.account, name)
    if of_job is None or not facts.enforces("qos"):
        return
    allowed = partition.listed("AllowQos")
    if allowed is None:
        yield from _denied("QOS", of_job.name, partition.listed("DenyQos"), partition)
    elif of_job.name not in allowed:
        message = f"{of_job.name}: partition {name} takes only QOS {', '.join(allowed[:_LISTED])}"
        yield KeyProblem("slurm.qos", message, "write one of these, or submit to another partition")


def _denied(
    noun: str, value: str | None, denied: Sequence[str] | None, partition: Partition
) -> Iterator[KeyProblem]:
    """Yield a problem if the partition refuses the account or QOS by name."""
    if value is not None and value.lower() in (denied or ()):
        message = f"{value}: partition {partition.name} refuses this {noun}"
        remedy = f"write another {noun}, or submit to another partition"
        yield KeyProblem(f"slurm.{noun.lower()}", message, remedy)


def _may_lift(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition, flag: str) -> bool:
    """Return True if the job's QOS lifts a limit of the partition by this flag, or is unknown."""
    if not facts.has_accounting:
        return False
    of_job = facts.qos_of(slurm.qos, slurm.account, partition.name)
    return of_job is None or flag in of_job.flags


def time_limit(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """The time limit is within the partition's."""
    most_s = partition.max_time_s
    if slurm.time_limit is None or most_s is None or slurm.time_limit * 60 <= most_s:
        return
    if not _may_lift(slurm, facts, partition, "partitiontimelimit"):
        yield KeyProblem(
            "slurm.time_limit",
            f"{slurm.time_limit} min exceed the {most_s // 60} min of partition {partition.name}",
            f"write at most {most_s // 60}min, or submit to another partition",
        )


def node_counts(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """The number of nodes is one that the partition allows."""
    may_lift = partial(_may_lift, slurm, facts, partition)
    most, fewest = partition.number("MaxNodes"), partition.number("MinNodes")
    if most is not None and min_nodes(slurm) > most and not may_lift("partitionmaxnodes"):
        message = f"{slurm.nodes}, but a job in partition {partition.name} gets at most {most} (MaxNodes)"
        yield KeyProblem("slurm.nodes", message, f"write at most {most}, or submit to another partition")
    if fewest is not None and max_nodes(slurm) < fewest and not may_lift("partitionminnodes"):
        message = f"{slurm.nodes}, but a job in partition {partition.name} needs at least {fewest} (MinNodes)"
        yield KeyProblem("slurm.nodes", message, f"write at least {fewest}, or submit to another partition")


def node_sizes(slurm: SlurmConfig, facts: ClusterFacts, partition: Partition) -> Iterator[KeyProblem]:
    """Enough nodes of the partition satisfy the file's request per node."""
    most_mb = partition.number("MaxMemPerNode")
    if slurm.mem_gb is not None and most_mb is not None and slurm.mem_gb * 1024 > most_mb:
        message = f"{slurm.mem_gb}, but partition {partition.name} gives {most_mb / 1024:g} per node"
        yield KeyProblem("slurm.mem_gb", f"{message} (MaxMemPerNode)", "write less, or another partition")
    members = facts.nodes_of(partition.name)
    nodes = [member.node for member in members]
    if not nodes or not facts.lists_all_nodes(partition):
        return
    remedy = "write what a node has, or another partition"
    lines = list(unsatisfiable.too_much(slurm, nodes)) or list(unsatisfiable.too_few(slurm, nodes))
    for line in lines:
        key, _, message = line.partition(": ")
        yield KeyProblem(key, message, remedy)
    yield from _outside(slurm, partition, [member.name for member in members])


def _outside(slurm: SlurmConfig, partition: Partition, members: Sequence[str]) -> Iterator[KeyProblem]:
    """Yield a problem for nodes that the file requires and that are not in the partition."""
    required = expanded(str(slurm.extra.get("nodelist") or ""))
    outside = [name for name in required if name not in members]
    if outside:
        message = f"node {outside[0]} is not in partition {partition.name}"
        remedy = f"write nodes that `sinfo -N -p {partition.name}` lists, or another partition"
        yield KeyProblem("slurm.extra.nodelist", message, remedy)
    remaining = set(members) - set(expanded(slurm.exclude or ""))
    if slurm.exclude and len(remaining) < min_nodes(slurm) <= len(members):
        message = f"leaves {len(remaining)} of the {len(members)} nodes of partition {partition.name}"
        yield KeyProblem("slurm.exclude", f"{message}, and the job needs {min_nodes(slurm)}", "exclude fewer")
