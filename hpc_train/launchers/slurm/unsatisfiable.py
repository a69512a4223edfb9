"""Which request of a job no node of its partition can satisfy, where Slurm only says ``BadConstraints``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.errors import UserError
from hpc_train.launchers.slurm import commands

#: ``gpu:4``, ``gpu:a100:4(S:0-1)``
_GPUS = re.compile(r"gpu(?::(?P<kind>[\w.-]+))?:(?P<count>\d+)")
#: Names in a constraint like ``a100&nvme`` or ``[rack1*2|rack2]``.
_FEATURE = re.compile(r"[A-Za-z_][\w.-]*")
_LISTED = 8


@dataclass(frozen=True)
class Node:
    """What one node of a partition has."""

    cpus: int
    memory_mb: int
    features: frozenset[str]
    #: Kind, in small letters, of its GPUs (empty where Slurm names none) → how many.
    gpus: dict[str, int]

    @classmethod
    def parse(cls, line: str) -> Node | None:
        """Read a line of ``sinfo --format=%c|%m|%G|%f``; None where it is none."""
        cpus, memory, gres, features = [*line.strip().split("|"), "", "", ""][:4]
        if not (cpus.isdecimal() and memory.isdecimal()):
            return None
        gpus: dict[str, int] = {}
        for found in _GPUS.finditer(gres):
            kind = (found["kind"] or "").lower()
            gpus[kind] = gpus.get(kind, 0) + int(found["count"])
        return cls(int(cpus), int(memory), frozenset(features.split(",")), gpus)


def unsatisfied(slurm: SlurmConfig) -> list[str]:
    """Return ``slurm.<key>: <value>, but …`` for each request that exceeds what any node has.

    Empty where the nodes can't be asked for, or where only the requests together are too much.
    """
    nodes = _nodes(slurm.partition)
    return list(too_much(slurm, nodes)) if nodes else []


def requested(slurm: SlurmConfig) -> list[str]:
    """Return ``slurm.<key>: <value>`` of everything that the file asks of a node."""
    keys = ("nodes", "gpus_per_node", "gpu_type", "cpus_per_gpu", "mem_gb", "constraint", "exclude")
    return [f"slurm.{key}: {value}" for key in keys if (value := getattr(slurm, key)) not in {None, 0}]


def _nodes(partition: str | None) -> list[Node]:
    where = [f"--partition={partition}"] if partition else []
    try:
        said = commands.run(["sinfo", "--noheader", "--Node", "--format=%c|%m|%G|%f", *where])
    except UserError:  # no answer, or a refusal: then nothing is known
        return []
    return [node for line in said.splitlines() if (node := Node.parse(line))]


def too_much(slurm: SlurmConfig, nodes: list[Node]) -> Iterator[str]:
    """Yield the lines of ``unsatisfied`` for these nodes, of which there is at least one."""
    known = {feature for node in nodes for feature in node.features} - {"", "(null)"}
    for feature in dict.fromkeys(_FEATURE.findall(slurm.constraint or "")):
        if feature not in known:
            yield f"slurm.constraint: {feature}, but no node has this feature ({_listed(known)})"
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
    cpus, most_cpus = max(1, slurm.gpus_per_node) * (slurm.cpus_per_gpu or 1), max(n.cpus for n in nodes)
    if cpus > most_cpus:
        yield f"slurm.cpus_per_gpu: {slurm.cpus_per_gpu} is {cpus} per node, a node has at most {most_cpus}"
    fewest = slurm.nodes if isinstance(slurm.nodes, int) else int(str(slurm.nodes).partition("-")[0])
    if fewest > len(nodes):
        yield f"slurm.nodes: {slurm.nodes}, but the partition has {len(nodes)}"


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:_LISTED]
    return (
        f"there are {', '.join(shown)}{', …' if len(names) > _LISTED else ''}" if names else "there are none"
    )
