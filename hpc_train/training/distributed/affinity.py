"""CPU affinity of a rank, if Slurm assigned a node's cores to all ranks of the node together.

Slurm binds ranks itself if the site configures it. Otherwise ranks migrate between all cores and lose their
caches and the locality to their GPU. Called by ``training.rank``, on Slurm only: outside a job the free
cores are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hpc_train.rank.env import RankFacts
from hpc_train.run.resource_limits import usable_cpus

_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")
#: More than a GPU needs for most data; each takes memory (assumed).
_MAX_LOADERS = 16


def bind(facts: RankFacts, device: torch.device, environ: Mapping[str, str]) -> int:
    """Bind this rank to its part of the node's cores if Slurm has not done so.

    Returns the number of ranks that share the cores of this process, for ``set_threads``.
    """
    job_cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if not job_cpus.isdecimal() or int(job_cpus) == 0:
        return facts.local_world_size
    mask = usable_cpus()
    if len(mask) == int(job_cpus) and facts.local_world_size > 1:
        near = _near_gpus(facts.local_world_size) if device.type == "cuda" else []
        cpus = slice_of(physical_cores(mask), near, facts.local_rank, facts.local_world_size)
        if cpus is not None:
            with suppress(OSError):  # not permitted: ranks share the cores
                os.sched_setaffinity(0, cpus)
    return num_sharing(len(usable_cpus()), int(job_cpus), facts.local_world_size)


def num_sharing(num_usable: int, job_cpus: int, local_world_size: int) -> int:
    """Return the number of ranks that share ``num_usable`` cores, given the job's cores on this node.

    If there are fewer than the job has, Slurm bound the ranks. If there are more, the job is not confined,
    and some belong to others.
    """
    return max(1, round(num_usable * local_world_size / job_cpus))


def loader_processes(num_sharing: int, device: torch.device) -> int:
    """Return the loader processes of ``data.workers: auto``: a rule of thumb, which changes no result.

    ``num_sharing``: ranks that share the CPUs of this process. One CPU is reserved for the rank. On the CPU
    device the rank computes with all of them while one process prepares the next batch.
    """
    spare = len(usable_cpus()) // num_sharing - 1
    return max(0, min(spare, _MAX_LOADERS if device.type == "cuda" else 1))


def slice_of(
    cores: Sequence[frozenset[int]],
    near: Sequence[frozenset[int]],
    local_rank: int,
    local_world_size: int,
) -> frozenset[int] | None:
    """Return the CPUs of one rank; None if there are too few to divide.

    ``cores``: the CPUs of each physical core, in order. ``near``: for each local rank the CPUs near its GPU,
    empty if unknown. Ranks whose GPUs are near the same CPUs divide those; each core goes to one rank.
    """
    groups = _by_nearness(cores, near, local_world_size)
    members, shared = next(group for group in groups if local_rank in group[0])
    index, count = members.index(local_rank), len(members)
    part = shared[len(shared) * index // count : len(shared) * (index + 1) // count]
    return frozenset().union(*part) if len(shared) >= count else None


def _by_nearness(
    cores: Sequence[frozenset[int]], near: Sequence[frozenset[int]], local_world_size: int
) -> list[tuple[list[int], list[frozenset[int]]]]:
    """Return groups of ranks with their cores; a single group if the division can't follow locality."""
    one_group = [(list(range(local_world_size)), list(cores))]
    if len(near) != local_world_size or not all(near):
        return one_group
    groups = []
    for cpus in dict.fromkeys(near):
        members = [rank for rank in range(local_world_size) if near[rank] == cpus]
        groups.append((members, [core for core in cores if core <= cpus]))
    assigned = [core for _, part in groups for core in part]
    # Unfair if CPUs are near two GPUs, or if all cores of the job are near one.
    is_fair = len(assigned) == len(set(assigned)) and all(
        len(part) >= len(members) for members, part in groups
    )
    return groups if is_fair else one_group


def physical_cores(cpus: set[int]) -> list[frozenset[int]]:
    """Group CPUs that are hardware threads of one core, which slow each other down."""
    cores: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        siblings = parse_cpu_list(_read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")) & cpus
        cores.setdefault(min(siblings, default=cpu), set()).add(cpu)
    return [frozenset(cores[first]) for first in sorted(cores)]


def _near_gpus(local_world_size: int) -> list[frozenset[int]]:
    """Return the CPUs near each local rank's GPU; empty unless all ranks' GPUs are visible."""
    if torch.cuda.device_count() != local_world_size:
        return []
    return [
        parse_cpu_list(_read(_PCI / pci_id(index) / "local_cpulist")) for index in range(local_world_size)
    ]


def pci_id(index: int) -> str:
    """Return the PCI address of a GPU, as ``0000:41:00.0``; ``unknown`` if torch has none."""
    properties = torch.cuda.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0" if min(domain, bus, slot) >= 0 else "unknown"


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format: ``0-3,8`` is {0, 1, 2, 3, 8}; an invalid list is empty."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return frozenset()
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""
