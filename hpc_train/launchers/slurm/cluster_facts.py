"""Slurm's configuration, partitions, nodes and accounts, for ``doctor``, and a section for ``init``; the job
of this process, for ``--here``.

Names are set by the site and may contain any character: escape them before printing.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property

from hpc_train.errors import NoSchedulerError, UsageError, counted, shortened
from hpc_train.experiment.config.fields import GPU_TYPE_PATTERN, SLURM_WORD_PATTERN, format_duration
from hpc_train.experiment.config.schema import SlurmConfig
from hpc_train.experiment.validate.slurm_rules import min_nodes, ranks_on_each_node
from hpc_train.launchers.base import JobSection, KeyProblem
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.accounting import seconds
from hpc_train.launchers.slurm.job_refusals import Node, too_many_slots
from hpc_train.launchers.slurm.options import cpus_per_node

#: Slurm's notations for a missing value.
_NOTHING = {"", "(null)", "N/A", "NONE", "none"}
_FORMAT = "%N|%R|%T|%c|%m|%G|%f"
_ASSOCIATION_FIELDS = ("account", "defaultaccount", "cluster")
#: States of ``sinfo`` in which a node accepts no new jobs until it is repaired.
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval")
#: Shorter than most limits: a job resumes after it, and short jobs start sooner. Assumed.
_TIME_MIN = 24 * 60
_LISTED = 8
#: Cores per rank that loader processes can use. Assumed.
_CPUS_MAX = 16
#: Values of ``AccountingStorageEnforce`` with which sbatch refuses users without an association.
_ENFORCE_ASSOCIATIONS = {"associations", "all", "limits", "qos", "safe", "wckeys"}

#: A node of ``scontrol --details show job``: cores, megabytes, generic resources.
_ALLOCATED = re.compile(r"(?:^|\s)Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)(?: GRES=(\S*))?")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_SALLOC = "salloc --nodes=2, for example"
#: Above the ids of steps by srun: Slurm's own, such as the shell of salloc, hold no cores.
_OWN_STEPS = 0xFFFF0000


@dataclass(frozen=True)
class Partition:
    """A line of ``scontrol show partition``."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its name as in ``slurm.partition``; empty if the line has none."""
        return self.values.get("PartitionName", "")

    @property
    def is_default(self) -> bool:
        """Whether it is the default partition."""
        return self.values.get("Default") == "YES"

    @property
    def is_up(self) -> bool:
        """Whether it both queues and starts jobs."""
        return self.values.get("State", "UP") == "UP"

    @property
    def max_time_s(self) -> int | None:
        """The limit of a job's time; None: unlimited."""
        return int(seconds(self.values.get("MaxTime", ""))) or None


@dataclass(frozen=True)
class PartitionNode:
    """A node as a member of one partition."""

    name: str
    partition: str
    state: str
    node: Node

    @classmethod
    def parse(cls, line: str) -> PartitionNode | None:
        """Read a line of ``sinfo`` in ``_FORMAT``; None for any other line."""
        name, partition, state, resources = [*line.strip().split("|", 3), "", "", ""][:4]
        node = Node.parse(resources)
        return None if node is None else cls(name, partition, state, node)

    @property
    def is_usable(self) -> bool:
        """Whether it accepts jobs without a repair; a node whose state ends in ``*`` does not respond."""
        return not self.state.lower().startswith(_UNUSABLE) and not self.state.endswith("*")


@dataclass(frozen=True)
class Association:
    """An account that this user may charge, from ``sacctmgr show user withassoc``."""

    account: str
    is_default: bool


@dataclass(frozen=True)
class ClusterFacts:
    """The facts that were read. ``associations``: None without accounting or its answer."""

    config: Mapping[str, str]
    partitions: Sequence[Partition]
    nodes: Sequence[PartitionNode]
    associations: Sequence[Association] | None = None

    def number(self, name: str) -> int | None:
        """Return a setting that is a number, such as ``KillWait``: ``30 sec``; None for any other value."""
        parts = self.config.get(name, "").split()
        return int(parts[0]) if parts and parts[0].isdecimal() else None

    def text(self, name: str) -> str:
        """Return a setting; empty if unset."""
        value = self.config.get(name, "")
        return "" if value in _NOTHING else value

    @property
    def has_accounting(self) -> bool:
        """Whether there is a database of ended jobs. 22.05 prints accounting_storage/none, 24.11 (null)."""
        return not self.text("AccountingStorageType").endswith("/none") and bool(
            self.text("AccountingStorageType")
        )

    @property
    def enforces_associations(self) -> bool:
        """Whether sbatch refuses accounts that the user may not charge."""
        return not _ENFORCE_ASSOCIATIONS.isdisjoint(self.text("AccountingStorageEnforce").lower().split(","))

    @property
    def accounts(self) -> list[str]:
        """The user's accounts, the default one first."""
        associations = sorted(self.associations or (), key=lambda association: not association.is_default)
        return list(dict.fromkeys(association.account for association in associations))

    @cached_property
    def default(self) -> Partition | None:
        """The cluster's default partition; None if it has none."""
        return next((partition for partition in self.partitions if partition.is_default), None)

    def partition(self, name: str) -> Partition | None:
        """Return the partition with this name, which may be hidden; None if there is none."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def nodes_of(self, partition: str) -> list[PartitionNode]:
        """Return the nodes of the partition that ``sinfo`` lists, including nodes that are down."""
        return [node for node in self.nodes if node.partition == partition]


def read() -> ClusterFacts:
    """Query Slurm. Raises NoSchedulerError if there is none or no answer, RefusedError if it refuses."""
    config = commands.parsed_config(commands.run(["scontrol", "show", "config"]))
    # --all: hidden partitions accept jobs as well.
    partitions = commands.run(["scontrol", "--all", "--oneliner", "show", "partition"])
    nodes = commands.run(["sinfo", "--all", "--noheader", "--Node", f"--format={_FORMAT}"])
    facts = ClusterFacts(config, parsed_partitions(partitions), parsed_nodes(nodes))
    if not facts.has_accounting:
        return facts
    return replace(facts, associations=_associations(facts.text("ClusterName")))


def parsed_partitions(output: str) -> list[Partition]:
    """Return the partitions of ``scontrol --oneliner show partition``."""
    lines = [line for line in output.split("\n") if line.startswith("PartitionName=")]
    return [Partition(commands.fields(line)) for line in lines]


def parsed_nodes(output: str) -> list[PartitionNode]:
    """Return the nodes of ``sinfo``, once for each partition that has them."""
    return [node for line in output.split("\n") if (node := PartitionNode.parse(line))]


def parsed_associations(output: str, cluster: str = "") -> list[Association]:
    """Return the associations with this cluster, or with all if its name is unknown (``""``)."""
    rows = [line.split("|") for line in output.split("\n")]
    return [
        Association(row[0], row[0] == row[1])
        for row in rows
        if len(row) == len(_ASSOCIATION_FIELDS) and row[0] and cluster.lower() in {"", row[2].lower()}
    ]


def _associations(cluster: str) -> list[Association] | None:
    """Return the user's associations; None if ``sacctmgr`` is not here, or its database is down."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "withassoc"]
    try:
        output = commands.run([*argv, f"format={','.join(_ASSOCIATION_FIELDS)}"])
    except (NoSchedulerError, commands.RefusedError):
        return None
    return parsed_associations(output, cluster)


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
    first, *more = facts.accounts or [""]
    if more and re.fullmatch(SLURM_WORD_PATTERN, first):
        values["account"] = first
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
    nodes = [[node.node for node in facts.nodes_of(candidate.name)] for candidate in possible]
    with_gpus = [candidate for candidate, of_it in zip(possible, nodes, strict=True) if _gpus(of_it)[1]]
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


def _notes(facts: ClusterFacts) -> Iterator[str]:
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


@dataclass(frozen=True)
class AllocatedNode:
    """The part of a node that belongs to the job."""

    name: str
    cpus: int
    #: 0: not limited.
    mem_mb: int
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """A job that the user already has, for ``--here``."""

    #: ``12``, or ``12_3`` for an array's task.
    job: str
    nodes: tuple[AllocatedNode, ...]
    #: When its time limit ends it, in seconds since 1970; None without a limit.
    end_s: float | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Allocation:
        """Query the job of this process. Raises UsageError outside of a job, or if it is not running."""
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
        if not job:
            raise UsageError(
                "--here: this shell is in no Slurm job (SLURM_JOB_ID is not set); run it in a shell of "
                f"salloc ({_SALLOC}) or in a batch script, or omit --here to queue a job"
            )
        try:
            shown = commands.run(["scontrol", "--oneliner", "--details", "show", "job", job], retry=True)
        except commands.RefusedError as error:
            raise UsageError(f"--here: Slurm does not know job {job} (SLURM_JOB_ID): {error.words}") from None
        return cls.of(job, commands.job_line(shown))

    @classmethod
    def of(cls, job: str, shown: str) -> Allocation:
        """Return the job of a line of ``scontrol --details show job``. Raises UsageError unless it runs."""
        state = re.search(r"\bJobState=(\S+)", shown)
        if state is None or state[1] != "RUNNING":
            raise UsageError(
                f"--here: job {job} (SLURM_JOB_ID) is {state[1] if state else 'unknown'}, so it has no nodes "
                f"to use; get others with salloc ({_SALLOC})"
            )
        nodes = tuple(
            AllocatedNode(name, _num_cpus(cpus), int(mem), sum(map(int, _GPUS.findall(gres))))
            for names, cpus, mem, gres in _ALLOCATED.findall(shown)
            for name in commands.run(["scontrol", "show", "hostnames", names], retry=True).split()
        )
        if not nodes:
            raise UsageError(f"--here: `scontrol --details show job {job}` names no nodes")
        ends = re.search(r" EndTime=(\d\d\d\d-[\dT:-]+)", shown)
        end = None if ends is None else datetime.fromisoformat(ends[1]).replace(tzinfo=UTC)
        return cls(job, nodes, None if end is None else end.timestamp())

    @property
    def least(self) -> AllocatedNode:
        """The minimum of each resource on a node."""
        nodes = self.nodes
        mem_mb = min((node.mem_mb for node in nodes if node.mem_mb), default=0)
        cpus, gpus = min(node.cpus for node in nodes), min(node.gpus for node in nodes)
        return AllocatedNode("a node", cpus, mem_mb, gpus)

    def excesses(self, slurm: SlurmConfig, count: int | None) -> list[KeyProblem]:
        """Return the keys that request more than the job has; ``count``: its nodes to use, None: all."""
        job, least, have, problems = self.job, self.least, len(self.nodes), list[KeyProblem]()
        if count is None and min_nodes(slurm) > have:
            message = f"{slurm.nodes} exceeds the {counted(have, 'node')} of job {job}"
            problems.append(KeyProblem("slurm.nodes", message, f"add --nodes {have} to use what is there"))
        if slurm.gpus_per_node > least.gpus:
            message = f"{slurm.gpus_per_node} exceeds the {counted(least.gpus, 'GPU')} per node of job {job}"
            remedy = f"write {least.gpus}, or allocate with salloc --gpus-per-node={slurm.gpus_per_node}"
            problems.append(KeyProblem("slurm.gpus_per_node", message, remedy))
        if (cores := cpus_per_node(slurm)) > least.cpus:
            key = "slurm.cpus_per_gpu" if slurm.cpus_per_gpu else "slurm.ranks_per_node"
            ranks = counted(ranks_on_each_node(slurm), "rank")
            message = f"{ranks} per node need {cores} cores, job {job} has {least.cpus}"
            remedy = f"write less, or allocate more cores: salloc -c {cores}"
            problems.append(KeyProblem(key, message, remedy))
        if slurm.mem_gb is not None and 0 < least.mem_mb < slurm.mem_gb * 1024:
            message = f"{slurm.mem_gb} exceeds the {least.mem_mb / 1024:.1f} GB per node of job {job}"
            remedy = f"write less, or allocate more: salloc --mem={slurm.mem_gb}G"
            problems.append(KeyProblem("slurm.mem_gb", message, remedy))
        return problems or self._slot_problems(slurm)

    def _slot_problems(self, slurm: SlurmConfig) -> list[KeyProblem]:
        """Return why ``runs_per_job`` runs can't train at the same time on a node, each in a step by srun."""
        if slurm.runs_per_job == 1:
            return []
        if slurm.runs_per_gpu > 1:
            return [KeyProblem("slurm.runs_per_gpu", "is not supported with --here", "take it out")]
        step = os.environ.get("SLURM_STEP_ID", "")
        if step.isdecimal() and int(step) < _OWN_STEPS:
            message = f"this shell is step {step} of job {self.job}, which holds cores that the runs wait for"
            remedy = "start it in the shell of salloc or in a batch script, or take runs_per_job out"
            return [KeyProblem("slurm.runs_per_job", message, remedy)]
        least = self.least
        node = Node(least.cpus, least.mem_mb or 1 << 40, frozenset(), {"": least.gpus})
        return list(too_many_slots(slurm, [node]))


def _num_cpus(listed: str) -> int:
    ranges = (part.partition("-") for part in listed.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
