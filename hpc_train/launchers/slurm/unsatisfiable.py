"""Finds requests that no node of the partition can satisfy if Slurm's only reason is ``BadConstraints``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.errors import UserError, listed
from hpc_train.launchers.slurm import commands
from hpc_train.validate.slurm_rules import min_nodes, ranks_on_each_node

#: ``gpu:4``, ``gpu:a100:4(S:0-1)``
_GPUS = re.compile(r"gpu(?::(?P<kind>[\w.-]+))?:(?P<count>\d+)")
#: Between the names of a constraint like ``a100&nvme`` or ``[rack1*2|rack2]``.
_BETWEEN_FEATURES = re.compile(r"[&|,()\[\]]+")
_COUNT = re.compile(r"\*\d+$")
_FEATURE = re.compile(r"[\w.:+=/-]+")
_LISTED = 8


@dataclass(frozen=True)
class Node:
    """Resources of one node of a partition."""

    cpus: int
    memory_mb: int
    features: frozenset[str]
    #: Kind, in lower case, of its GPUs (empty if Slurm names none) → number.
    gpus: dict[str, int]

    @classmethod
    def parse(cls, line: str) -> Node | None:
        """Read a line of ``sinfo --format=%c|%m|%G|%f``; None for any other line."""
        cpus, memory, gres, features = [*line.strip().split("|"), "", "", ""][:4]
        if not (cpus.isdecimal() and memory.isdecimal()):
            return None
        gpus: dict[str, int] = {}
        for match in _GPUS.finditer(gres):
            kind = (match["kind"] or "").lower()
            gpus[kind] = gpus.get(kind, 0) + int(match["count"])
        return cls(int(cpus), int(memory), frozenset(features.split(",")), gpus)


def unsatisfied(slurm: SlurmConfig) -> list[str]:
    """Return ``slurm.<key>: <value>, but …`` for each request that exceeds every node.

    Empty if the nodes can't be queried, or if only the combination of requests is too much.
    """
    nodes = _nodes(slurm.partition)
    return list(too_much(slurm, nodes)) if nodes else []


def requested(slurm: SlurmConfig) -> list[str]:
    """Return ``slurm.<key>: <value>`` of each request of the file per node."""
    keys = ("nodes", "gpus_per_node", "gpu_type", "cpus_per_gpu", "mem_gb", "constraint", "exclude")
    return [f"slurm.{key}: {value}" for key in keys if (value := getattr(slurm, key)) not in {None, 0}]


def _nodes(partition: str | None) -> list[Node]:
    where = [f"--partition={partition}"] if partition else []
    try:
        output = commands.run(["sinfo", "--noheader", "--Node", "--format=%c|%m|%G|%f", *where])
    except UserError:  # no answer, or a refusal
        return []
    return [node for line in output.splitlines() if (node := Node.parse(line))]


def too_much(slurm: SlurmConfig, nodes: list[Node]) -> Iterator[str]:
    """Yield the lines of ``unsatisfied`` for these nodes, at least one."""
    features = {feature for node in nodes for feature in node.features} - {"", "(null)"}
    for feature in features_of(slurm.constraint or ""):
        if feature not in features:
            yield f"slurm.constraint: {feature}, but no node has this feature ({_listed(features)})"
    kinds = {kind for node in nodes for kind in node.gpus} - {""}
    kind = (slurm.gpu_type or "").lower()
    if kind and kind not in kinds:
        yield f"slurm.gpu_type: {slurm.gpu_type}, but no node has such GPUs ({_listed(kinds)})"
    most_gpus = max(node.gpus.get(kind, 0) if kind in kinds else sum(node.gpus.values()) for node in nodes)
    if slurm.gpus_per_node > most_gpus:
        yield f"slurm.gpus_per_node: {slurm.gpus_per_node}, but a node has at most {most_gpus}"
    most_gb = max(node.memory_mb for node in nodes) / 1024
    if slurm.mem_gb is not None and slurm.mem_gb > most_gb:
        yield f"slurm.mem_gb: {slurm.mem_gb}, but a node has at most {most_gb:.0f}"
    cpus, most_cpus = needed_cpus(slurm), max(node.cpus for node in nodes)
    if cpus > most_cpus and slurm.cpus_per_gpu is not None:
        yield f"slurm.cpus_per_gpu: {slurm.cpus_per_gpu} is {cpus} per node, a node has at most {most_cpus}"
    elif cpus > most_cpus:
        yield f"slurm.ranks_per_node: {cpus} ranks need a core each, a node has at most {most_cpus}"
    if min_nodes(slurm) > len(nodes):
        yield f"slurm.nodes: {slurm.nodes}, but the partition has {len(nodes)}"


def features_of(constraint: str) -> list[str]:
    """Return the features that a constraint names; empty if it contains more than names and counts."""
    parts = [_COUNT.sub("", word).strip() for word in _BETWEEN_FEATURES.split(constraint)]
    names = list(dict.fromkeys(word for word in parts if word))
    return names if all(map(_FEATURE.fullmatch, names)) else []


def too_few(slurm: SlurmConfig, nodes: list[Node]) -> Iterator[str]:
    """Yield a line like those of ``too_much`` if too few nodes satisfy all requests together."""
    fitting = sum(_fits(slurm, node) for node in nodes)
    fewest = min_nodes(slurm)
    if fitting < fewest <= len(nodes):
        requests = ", ".join(line for line in requested(slurm) if not line.startswith("slurm.nodes"))
        have = "1 node has" if fitting == 1 else f"{fitting or 'no'} nodes have"
        yield f"slurm.nodes: {slurm.nodes}, but {have} all of: {requests}"


def _fits(slurm: SlurmConfig, node: Node) -> bool:
    """Return True if the node satisfies the file's request; alternative features are ignored."""
    kind = (slurm.gpu_type or "").lower()
    gpus = node.gpus.get(kind, 0) if kind in node.gpus else sum(node.gpus.values())
    features = set((slurm.constraint or "").split("&")) - {""}
    return (
        node.cpus >= needed_cpus(slurm)
        and gpus >= slurm.gpus_per_node
        and (not kind or kind in node.gpus)
        and node.memory_mb >= (slurm.mem_gb or 0) * 1024
        and (any(not _FEATURE.fullmatch(feature) for feature in features) or features <= node.features)
    )


def needed_cpus(slurm: SlurmConfig) -> int:
    """Return the minimum number of cores that the job needs on each node."""
    ranks = ranks_on_each_node(slurm)
    return max(ranks, (slurm.gpus_per_node or ranks) * (slurm.cpus_per_gpu or 1))


def _listed(names: set[str]) -> str:
    return f"there are {listed(sorted(names), _LISTED)}" if names else "there are none"
