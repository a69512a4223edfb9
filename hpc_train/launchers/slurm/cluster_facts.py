"""What Slurm says of itself, its partitions, its nodes and this user: read for ``doctor`` and ``init``.

Names are those of the site, which may contain anything: whoever prints them escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.unsatisfiable import Node

#: As Slurm prints that there is no value.
_NOTHING = {"", "(null)", "N/A", "NONE", "none"}
_KEY = re.compile(r"(?:^| )([A-Za-z][\w/]*)=")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)")
_FORMAT = "%N|%R|%T|%c|%m|%G|%f"
#: States of ``sinfo`` in which a node takes no new job until somebody repairs it.
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval")


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
        return self.values.get("PartitionName", "")

    @property
    def is_default(self) -> bool:
        return self.values.get("Default") == "YES"

    @property
    def is_up(self) -> bool:
        return self.values.get("State", "UP") == "UP"

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
        return not self.state.lower().startswith(_UNUSABLE) and not self.state.endswith("*")


@dataclass(frozen=True)
class Association:
    """What this user may charge, of ``sacctmgr show associations``."""

    account: str
    partition: str
    qos: tuple[str, ...]
    max_submit: int | None
    is_default: bool


@dataclass(frozen=True)
class ClusterFacts:
    """All that was read. ``associations``: None where there is no accounting, or it does not answer."""

    config: Mapping[str, str]
    partitions: Sequence[Partition]
    nodes: Sequence[PartitionNode]
    associations: Sequence[Association] | None = None

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

    @cached_property
    def default(self) -> Partition | None:
        return next((each for each in self.partitions if each.is_default), None)

    def partition(self, name: str) -> Partition | None:
        return next((each for each in self.partitions if each.name == name), None)

    def nodes_of(self, partition: str) -> list[PartitionNode]:
        return [node for node in self.nodes if node.partition == partition]


def read() -> ClusterFacts:
    """Ask Slurm. Raises NoSchedulerError where there is none or no answer, RefusedError where it says no."""
    config = parsed_config(commands.run(["scontrol", "show", "config"]))
    partitions = commands.run(["scontrol", "--oneliner", "show", "partition"])
    nodes = commands.run(["sinfo", "--noheader", "--Node", f"--format={_FORMAT}"])
    facts = ClusterFacts(config, parsed_partitions(partitions), parsed_nodes(nodes))
    associations = _associations() if facts.has_accounting else None
    return ClusterFacts(facts.config, facts.partitions, facts.nodes, associations)


def parsed_config(said: str) -> dict[str, str]:
    """Return the settings of ``scontrol show config``."""
    pairs = [line.partition("=") for line in said.splitlines() if "=" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}


def parsed_partitions(said: str) -> list[Partition]:
    """Return the partitions of ``scontrol --oneliner show partition``."""
    return [Partition.parse(line) for line in said.split("\n") if line.startswith("PartitionName=")]


def parsed_nodes(said: str) -> list[PartitionNode]:
    """Return the nodes of ``sinfo``, once for each partition that has them."""
    return [node for line in said.split("\n") if (node := PartitionNode.parse(line))]


def parsed_associations(said: str) -> list[Association]:
    """Return the associations: lines of account, partition, QOS, limit and default account."""
    return list(_parsed_associations(said))


def _parsed_associations(said: str) -> Iterator[Association]:
    for line in said.split("\n"):
        parts = line.split("|")
        if len(parts) == 5 and parts[0]:
            account, partition, qos, limit, default = parts
            most = int(limit) if limit.isdecimal() else None
            names = tuple(name for name in qos.split(",") if name)
            yield Association(account, partition, names, most, account == default)


def _associations() -> list[Association] | None:
    import getpass

    fields = "account,partition,qos,maxsubmit,defaultaccount"
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "withassoc"]
    try:
        said = commands.run([*argv, f"format={fields}"])
    except (NoSchedulerError, commands.RefusedError):
        return None  # not installed here, or its database is down
    return parsed_associations(said)


def seconds(text: str | None) -> int | None:
    """Return the seconds of ``2-00:00:00``, ``10:00`` or ``60``; None for UNLIMITED and any other text."""
    if text is None:
        return None
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    return int(text) if text.isdecimal() else None
