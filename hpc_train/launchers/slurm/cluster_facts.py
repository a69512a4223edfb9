"""Reads Slurm's configuration, partitions, nodes and this user's associations, for ``doctor`` and ``init``.

Names are set by the site and may contain any character: escape them before printing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.tres_limits import QOS_FIELDS, Limits, Qos, parsed_qos
from hpc_train.launchers.slurm.tres_limits import seconds as seconds
from hpc_train.launchers.slurm.unsatisfiable import Node

#: Slurm's notations for a missing value.
_NOTHING = {"", "(null)", "N/A", "NONE", "none"}
_KEY = re.compile(r"(?:^| )([A-Za-z][\w/]*)=")
_FORMAT = "%N|%R|%T|%c|%m|%G|%f"
_ASSOCIATION_FIELDS = (
    "account", "partition", "qos", "maxsubmit", "defaultaccount", "defaultqos", "maxwall", "maxtres",
    "grptres", "maxtrespernode", "cluster",
)  # fmt: skip
#: Fields up to the default account, which each version prints.
_NEEDED_FIELDS = 5
#: States of ``sinfo`` in which a node accepts no new jobs until it is repaired.
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval")
#: States of a partition that accepts no jobs, not even to wait.
_REFUSES_JOBS = ("INACTIVE", "DRAIN")
#: A value of ``AccountingStorageEnforce`` → other values that imply it.
_ALSO_ENFORCED_BY = {
    "associations": {"all", "limits", "qos", "safe", "wckeys"},
    "limits": {"all", "safe"},
    "qos": {"all"},
}
#: Plug-ins of JobSubmitPlugins and CliFilterPlugins that do not change a request's partition, account and
#: QOS.
_LEAVE_REQUESTS = {"require_timelimit", "logging", "throttle", "none"}


@dataclass(frozen=True)
class Partition:
    """A line of ``scontrol show partition``."""

    values: Mapping[str, str]

    @classmethod
    def parse(cls, line: str) -> Partition:
        """Read one line. A value ends before the next key."""
        keys = list(_KEY.finditer(line))
        ends = [key.start() for key in keys[1:]] + [len(line)]
        return cls({key[1]: line[key.end() : end].strip() for key, end in zip(keys, ends, strict=True)})

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
    def qos(self) -> str:
        """The QOS whose limits apply to its jobs, in lower case; empty if it has none."""
        value = self.values.get("QoS", "")
        return "" if value in _NOTHING else value.lower()

    @property
    def refuses_jobs(self) -> bool:
        """Whether it accepts no new jobs, not even to wait."""
        return self.values.get("State", "UP") in _REFUSES_JOBS

    @property
    def is_replaced(self) -> bool:
        """Whether its jobs go to its ``Alternate`` partition, since it accepts none itself."""
        return self.refuses_jobs and self.values.get("Alternate", "") not in _NOTHING

    def number(self, name: str) -> int | None:
        """Return a value that is a number, such as ``MaxNodes``; None for UNLIMITED."""
        value = self.values.get(name, "")
        return int(value) if value.isdecimal() else None

    def listed(self, name: str) -> list[str] | None:
        """Return a list of names, such as ``AllowAccounts``, in small letters; None for ALL or no list."""
        value = self.values.get(name, "ALL")
        return None if value == "ALL" or value in _NOTHING else value.lower().split(",")

    @property
    def max_time_s(self) -> int | None:
        """The limit of a job's time; None: unlimited."""
        return seconds(self.values.get("MaxTime"))

    @property
    def default_time_s(self) -> int | None:
        """The time limit of a job that requests none."""
        default_s = seconds(self.values.get("DefaultTime"))
        return self.max_time_s if default_s is None else default_s


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


_NO_LIMITS = Limits("your association")


@dataclass(frozen=True)
class Association:
    """An account that this user may charge, from ``sacctmgr show associations``."""

    account: str
    partition: str
    qos: tuple[str, ...]
    max_submit: int | None
    is_default: bool
    #: The QOS of jobs that request none; empty: the cluster's own default.
    default_qos: str = ""
    limits: Limits = _NO_LIMITS
    #: In lower case; empty if it was not printed.
    cluster: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """The facts that were read. ``associations`` and ``qos``: None without accounting or its answer;
    ``reservations``: names, None if unknown. ``node_names``: including nodes in no partition.
    """

    config: Mapping[str, str]
    partitions: Sequence[Partition]
    nodes: Sequence[PartitionNode]
    associations: Sequence[Association] | None = None
    qos: Sequence[Qos] | None = None
    reservations: Sequence[str] | None = None
    node_names: Sequence[str] | None = None

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

    def enforces(self, kind: str) -> bool:
        """Return True if ``associations``, ``limits`` or ``qos`` are enforced; some values imply others."""
        values = set(self.text("AccountingStorageEnforce").lower().split(","))
        return bool(values & {kind, *_ALSO_ENFORCED_BY[kind]})

    @property
    def rewrites_requests(self) -> bool:
        """Whether a plug-in of the site may change a request before Slurm checks it."""
        plugins = f"{self.text('JobSubmitPlugins')},{self.text('CliFilterPlugins')}".split(",")
        names = {name.strip().rpartition("/")[2] for name in plugins} - {""}
        return bool(names - _LEAVE_REQUESTS)

    def associations_of(self, account: str | None, partition: str) -> list[Association]:
        """Return the user's associations with the account, or with the default one, in this partition.

        Associations with this partition take precedence over associations with all partitions.
        """
        candidates = [
            association
            for association in self.associations or ()
            if (association.is_default if account is None else association.account == account.lower())
        ]
        specific = [
            association for association in candidates if association.partition.lower() == partition.lower()
        ]
        return specific or [association for association in candidates if not association.partition]

    def qos_named(self, name: str) -> Qos | None:
        """Return the QOS with this name, in lower case; None if there is none, or QOS are unknown."""
        return next((qos for qos in self.qos or () if qos.name == name), None)

    def qos_of(self, name: str | None, account: str | None, partition: str) -> Qos | None:
        """Return the QOS of a job that names this one, or none; None if unknown, as one of several is."""
        if name is not None:
            return self.qos_named(name.lower())
        associations = self.associations_of(account, partition)
        if not associations:
            return None
        # Slurm uses an association's QOS if there is only one.
        default = next(
            (
                association.default_qos or (association.qos[0] if len(association.qos) == 1 else "")
                for association in associations
            ),
            "",
        )
        return self.qos_named(default or "normal")

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

    def lists_all_nodes(self, partition: Partition) -> bool:
        """Return True if all nodes of the partition were listed: ``sinfo`` may hide powered-down nodes."""
        total = partition.number("TotalNodes")
        return total is None or len(self.nodes_of(partition.name)) >= total


def read() -> ClusterFacts:
    """Query Slurm. Raises NoSchedulerError if there is none or no answer, RefusedError if it refuses."""
    config = commands.parsed_config(commands.run(["scontrol", "show", "config"]))
    # --all: hidden partitions accept jobs as well.
    partitions = commands.run(["scontrol", "--all", "--oneliner", "show", "partition"])
    nodes = commands.run(["sinfo", "--all", "--noheader", "--Node", f"--format={_FORMAT}"])
    facts = ClusterFacts(config, parsed_partitions(partitions), parsed_nodes(nodes), node_names=_node_names())
    reservations = _reservations()
    if not facts.has_accounting:
        return replace(facts, reservations=reservations)
    with ThreadPoolExecutor() as pool:  # sacctmgr takes 0.3 s (measured), mostly waiting
        associations, qos = pool.submit(_associations, facts.text("ClusterName")), pool.submit(_qos)
    return replace(facts, associations=associations.result(), qos=qos.result(), reservations=reservations)


def parsed_partitions(output: str) -> list[Partition]:
    """Return the partitions of ``scontrol --oneliner show partition``."""
    return [Partition.parse(line) for line in output.split("\n") if line.startswith("PartitionName=")]


def parsed_nodes(output: str) -> list[PartitionNode]:
    """Return the nodes of ``sinfo``, once for each partition that has them."""
    return [node for line in output.split("\n") if (node := PartitionNode.parse(line))]


def parsed_associations(output: str, cluster: str = "") -> list[Association]:
    """Return the associations with this cluster: lines of ``_ASSOCIATION_FIELDS``, maybe without the last.

    ``cluster``: empty if its name is unknown; then associations with all clusters.
    """
    associations = _parsed_associations(output)
    return [
        association
        for association in associations
        if not cluster or association.cluster in {"", cluster.lower()}
    ]


def _parsed_associations(output: str) -> Iterator[Association]:
    for line in output.split("\n"):
        parts = line.split("|")
        if len(parts) < _NEEDED_FIELDS or not parts[0]:
            continue
        fields = dict(zip(_ASSOCIATION_FIELDS, parts, strict=False))
        most = int(fields["maxsubmit"]) if fields["maxsubmit"].isdecimal() else None
        names = tuple(name for name in fields["qos"].lower().split(",") if name)
        yield Association(
            fields["account"],
            fields["partition"],
            names,
            most,
            fields["account"] == fields["defaultaccount"],
            fields.get("defaultqos", "").lower(),
            Limits.parse(_NO_LIMITS.owner, fields),
            fields.get("cluster", "").lower(),
        )


def parsed_reservations(output: str) -> list[str]:
    """Return the names in ``scontrol --oneliner show reservation``."""
    return re.findall(r"^ReservationName=(\S+)", output, re.MULTILINE)


def _associations(cluster: str) -> list[Association] | None:
    import getpass

    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "withassoc"]
    output = _answer([*argv, f"format={','.join(_ASSOCIATION_FIELDS)}"])
    return None if output is None else parsed_associations(output, cluster)


def _qos() -> list[Qos] | None:
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={','.join(QOS_FIELDS)}"]
    output = _answer(argv)
    return None if output is None else parsed_qos(output)


def _reservations() -> list[str] | None:
    output = _answer(["scontrol", "--oneliner", "show", "reservation"])
    return None if output is None else parsed_reservations(output)


def _node_names() -> list[str] | None:
    output = _answer(["scontrol", "--all", "--oneliner", "show", "node"])
    return None if output is None else re.findall(r"^NodeName=(\S+)", output, re.MULTILINE)


def _answer(argv: Sequence[str]) -> str | None:
    """Return the program's output; None if it is not installed here, or its database is down."""
    try:
        return commands.run(argv)
    except (NoSchedulerError, commands.RefusedError):
        return None
