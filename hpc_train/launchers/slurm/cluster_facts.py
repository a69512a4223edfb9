"""What Slurm says of itself, its partitions, its nodes and this user: read for ``doctor`` and ``init``.

Names are those of the site, which may contain anything: whoever prints them escapes them.
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

#: As Slurm prints that there is no value.
_NOTHING = {"", "(null)", "N/A", "NONE", "none"}
_KEY = re.compile(r"(?:^| )([A-Za-z][\w/]*)=")
_FORMAT = "%N|%R|%T|%c|%m|%G|%f"
_ASSOCIATION_FIELDS = (
    "account", "partition", "qos", "maxsubmit", "defaultaccount", "defaultqos", "maxwall", "maxtres",
    "grptres", "maxtrespernode", "cluster",
)  # fmt: skip
#: Up to the default account: what each version prints.
_NEEDED_FIELDS = 5
#: States of ``sinfo`` in which a node takes no new job until somebody repairs it.
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval")
#: States of a partition that takes no jobs, not even to wait.
_REFUSES_JOBS = ("INACTIVE", "DRAIN")
#: What ``AccountingStorageEnforce`` enforces → the words that do so besides its own.
_ALSO_ENFORCED_BY = {
    "associations": {"all", "limits", "qos", "safe", "wckeys"},
    "limits": {"all", "safe"},
    "qos": {"all"},
}
#: Plug-ins of JobSubmitPlugins and CliFilterPlugins that leave a request's partition, account and QOS alone.
_LEAVE_REQUESTS = {"require_timelimit", "logging", "throttle", "none"}


@dataclass(frozen=True)
class Partition:
    """A line of ``scontrol show partition``."""

    values: Mapping[str, str]

    @classmethod
    def parse(cls, line: str) -> Partition:
        """Read one line. A value ends where the next key begins."""
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
        """The QOS whose limits hold for its jobs, in small letters; empty where it has none."""
        value = self.values.get("QoS", "")
        return "" if value in _NOTHING else value.lower()

    @property
    def refuses_jobs(self) -> bool:
        """Whether it takes no new jobs, not even to wait."""
        return self.values.get("State", "UP") in _REFUSES_JOBS

    @property
    def is_replaced(self) -> bool:
        """Whether its jobs go to its ``Alternate`` partition, since it takes none itself."""
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
        own = seconds(self.values.get("DefaultTime"))
        return self.max_time_s if own is None else own


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
        name, partition, state, rest = [*line.strip().split("|", 3), "", "", ""][:4]
        node = Node.parse(rest)
        return None if node is None else cls(name, partition, state, node)

    @property
    def is_usable(self) -> bool:
        """Whether it takes jobs without a repair first; a state that ends in ``*`` does not respond."""
        return not self.state.lower().startswith(_UNUSABLE) and not self.state.endswith("*")


_NO_LIMITS = Limits("your association")


@dataclass(frozen=True)
class Association:
    """What this user may charge, of ``sacctmgr show associations``."""

    account: str
    partition: str
    qos: tuple[str, ...]
    max_submit: int | None
    is_default: bool
    #: The QOS of jobs that request none; empty: the cluster's own default.
    default_qos: str = ""
    limits: Limits = _NO_LIMITS
    #: In small letters; empty where it was not printed.
    cluster: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """All that was read. ``associations`` and ``qos``: None where there is no accounting, or it does not
    answer; ``reservations``: names, None where Slurm does not say. ``node_names``: also of nodes in no
    partition.
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
        words = self.config.get(name, "").split()
        return int(words[0]) if words and words[0].isdecimal() else None

    def text(self, name: str) -> str:
        """Return a setting; empty where it has no value."""
        value = self.config.get(name, "")
        return "" if value in _NOTHING else value

    @property
    def has_accounting(self) -> bool:
        """Whether there is a database of ended jobs. 22.05 prints accounting_storage/none, 24.11 (null)."""
        return not self.text("AccountingStorageType").endswith("/none") and bool(
            self.text("AccountingStorageType")
        )

    def enforces(self, what: str) -> bool:
        """Tell whether ``associations``, ``limits`` or ``qos`` are enforced; some words imply others."""
        words = set(self.text("AccountingStorageEnforce").lower().split(","))
        return bool(words & {what, *_ALSO_ENFORCED_BY[what]})

    @property
    def rewrites_requests(self) -> bool:
        """Whether a plug-in of the site may change a request before Slurm checks it."""
        plugins = f"{self.text('JobSubmitPlugins')},{self.text('CliFilterPlugins')}".split(",")
        names = {name.strip().rpartition("/")[2] for name in plugins} - {""}
        return bool(names - _LEAVE_REQUESTS)

    def associations_of(self, account: str | None, partition: str) -> list[Association]:
        """Return the user's associations with the account, or with the default one, in this partition.

        One of this partition alone comes before one of all partitions.
        """
        found = [
            each
            for each in self.associations or ()
            if (each.is_default if account is None else each.account == account.lower())
        ]
        own = [each for each in found if each.partition.lower() == partition.lower()]
        return own or [each for each in found if not each.partition]

    def qos_named(self, name: str) -> Qos | None:
        """Return the QOS with this name, in small letters; None if there is none, or QOS are unknown."""
        return next((each for each in self.qos or () if each.name == name), None)

    def qos_of(self, name: str | None, account: str | None, partition: str) -> Qos | None:
        """Return the QOS of a job that names this one, or none; None if unknown, as one of several is."""
        if name is not None:
            return self.qos_named(name.lower())
        own = self.associations_of(account, partition)
        if not own:
            return None
        # Of an association with a single QOS Slurm takes that.
        default = next((each.default_qos or (each.qos[0] if len(each.qos) == 1 else "") for each in own), "")
        return self.qos_named(default or "normal")

    @cached_property
    def default(self) -> Partition | None:
        """The cluster's default partition; None if it has none."""
        return next((each for each in self.partitions if each.is_default), None)

    def partition(self, name: str) -> Partition | None:
        """Return the partition with this name, hidden ones included; None if there is none."""
        return next((each for each in self.partitions if each.name == name), None)

    def nodes_of(self, partition: str) -> list[PartitionNode]:
        """Return the nodes of the partition that ``sinfo`` lists, down ones included."""
        return [node for node in self.nodes if node.partition == partition]

    def lists_all_nodes(self, partition: Partition) -> bool:
        """Tell whether all nodes of the partition were listed: ``sinfo`` may hide those without power."""
        total = partition.number("TotalNodes")
        return total is None or len(self.nodes_of(partition.name)) >= total


def read() -> ClusterFacts:
    """Ask Slurm. Raises NoSchedulerError where there is none or no answer, RefusedError where it says no."""
    config = commands.parsed_config(commands.run(["scontrol", "show", "config"]))
    # --all: partitions that are hidden take jobs as well.
    partitions = commands.run(["scontrol", "--all", "--oneliner", "show", "partition"])
    nodes = commands.run(["sinfo", "--all", "--noheader", "--Node", f"--format={_FORMAT}"])
    facts = ClusterFacts(config, parsed_partitions(partitions), parsed_nodes(nodes), node_names=_node_names())
    reservations = _reservations()
    if not facts.has_accounting:
        return replace(facts, reservations=reservations)
    with ThreadPoolExecutor() as pool:  # sacctmgr takes 0.3 s (measured), most of which it waits
        associations, qos = pool.submit(_associations, facts.text("ClusterName")), pool.submit(_qos)
    return replace(facts, associations=associations.result(), qos=qos.result(), reservations=reservations)


def parsed_partitions(said: str) -> list[Partition]:
    """Return the partitions of ``scontrol --oneliner show partition``."""
    return [Partition.parse(line) for line in said.split("\n") if line.startswith("PartitionName=")]


def parsed_nodes(said: str) -> list[PartitionNode]:
    """Return the nodes of ``sinfo``, once for each partition that has them."""
    return [node for line in said.split("\n") if (node := PartitionNode.parse(line))]


def parsed_associations(said: str, cluster: str = "") -> list[Association]:
    """Return the associations with this cluster: lines of ``_ASSOCIATION_FIELDS``, maybe without the last.

    ``cluster``: empty if its name is not known; then those with all clusters.
    """
    found = _parsed_associations(said)
    return [each for each in found if not cluster or each.cluster in {"", cluster.lower()}]


def _parsed_associations(said: str) -> Iterator[Association]:
    for line in said.split("\n"):
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


def parsed_reservations(said: str) -> list[str]:
    """Return the names in ``scontrol --oneliner show reservation``."""
    return re.findall(r"^ReservationName=(\S+)", said, re.MULTILINE)


def _associations(cluster: str) -> list[Association] | None:
    import getpass

    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "withassoc"]
    said = _answer([*argv, f"format={','.join(_ASSOCIATION_FIELDS)}"])
    return None if said is None else parsed_associations(said, cluster)


def _qos() -> list[Qos] | None:
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={','.join(QOS_FIELDS)}"]
    said = _answer(argv)
    return None if said is None else parsed_qos(said)


def _reservations() -> list[str] | None:
    said = _answer(["scontrol", "--oneliner", "show", "reservation"])
    return None if said is None else parsed_reservations(said)


def _node_names() -> list[str] | None:
    said = _answer(["scontrol", "--all", "--oneliner", "show", "node"])
    return None if said is None else re.findall(r"^NodeName=(\S+)", said, re.MULTILINE)


def _answer(argv: Sequence[str]) -> str | None:
    """Return what the program said; None where it is not installed here, or its database is down."""
    try:
        return commands.run(argv)
    except (NoSchedulerError, commands.RefusedError):
        return None
