"""CPU affinity of a rank where Slurm gave a node's share of cores to all ranks of the node together.

Slurm binds ranks itself if the site configures it. Elsewhere ranks that wander over all cores lose their
caches, and locality to their GPU. Called by ``training.rank``, on Slurm only: outside a job the free cores
are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hpc_train.distributed.env import RankFacts
from hpc_train.run.resource_limits import usable_cpus

_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")
#: More than a GPU needs of most data, and each takes memory (assumed).
_MAX_LOADERS = 16


def bind(facts: RankFacts, device: torch.device, environ: Mapping[str, str]) -> int:
    """Bind this rank to its part of the node's cores if Slurm has not done so.

    Returns how many ranks share the cores that this process may use now, for ``set_threads``.
    """
    job_cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if not job_cpus.isdecimal() or int(job_cpus) == 0:
        return facts.local_world_size
    mask = usable_cpus()
    if len(mask) == int(job_cpus) and facts.local_world_size > 1:
        near = _near_gpus(facts.local_world_size) if device.type == "cuda" else []
        own = slice_of(physical_cores(mask), near, facts.local_rank, facts.local_world_size)
        if own is not None:
            with suppress(OSError):  # not permitted: ranks share the cores
                os.sched_setaffinity(0, own)
    return num_sharing(len(usable_cpus()), int(job_cpus), facts.local_world_size)


def num_sharing(num_usable: int, job_cpus: int, local_world_size: int) -> int:
    """Return how many ranks share ``num_usable`` cores, given the job's cores on this node.

    Fewer than the job has: Slurm bound ranks. More: the job is not confined, and some are others'.
    """
    return max(1, round(num_usable * local_world_size / job_cpus))


def loader_processes(num_sharing: int, device: torch.device) -> int:
    """Return the loader processes of ``data.workers: auto``: a rule of thumb, which changes no result.

    ``num_sharing``: ranks that share the CPUs that this process may use. One CPU remains for the rank; on the
    CPU device it computes with all of them, and one process prepares the next batch meanwhile.
    """
    spare = len(usable_cpus()) // num_sharing - 1
    return max(0, min(spare, _MAX_LOADERS if device.type == "cuda" else 1))


def slice_of(
    cores: Sequence[frozenset[int]],
    near: Sequence[frozenset[int]],
    local_rank: int,
    local_world_size: int,
) -> frozenset[int] | None:
    """Return the CPUs of one rank, or None if there are too few to divide.

    ``cores``: physical ones, each a list of its CPUs, in order. ``near``: by local rank the CPUs near its
    GPU, empty if unknown. Ranks whose GPUs are near the same CPUs share those; each core goes to one rank.
    """
    groups = _by_nearness(cores, near, local_world_size)
    members, own = next(group for group in groups if local_rank in group[0])
    index, count = members.index(local_rank), len(members)
    part = own[len(own) * index // count : len(own) * (index + 1) // count]
    return frozenset().union(*part) if len(own) >= count else None


def _by_nearness(
    cores: Sequence[frozenset[int]], near: Sequence[frozenset[int]], local_world_size: int
) -> list[tuple[list[int], list[frozenset[int]]]]:
    """Return groups of ranks with the cores they share: one group of all if locality can't decide."""
    everyone = [(list(range(local_world_size)), list(cores))]
    if len(near) != local_world_size or not all(near):
        return everyone
    groups = []
    for cpus in dict.fromkeys(near):
        members = [rank for rank in range(local_world_size) if near[rank] == cpus]
        groups.append((members, [core for core in cores if core <= cpus]))
    dealt = [core for _, own in groups for core in own]
    # CPUs that are near two GPUs, or a job whose cores are all on one side: locality does not help.
    is_fair = len(dealt) == len(set(dealt)) and all(len(own) >= len(members) for members, own in groups)
    return groups if is_fair else everyone


def physical_cores(cpus: set[int]) -> list[frozenset[int]]:
    """Group CPUs that are hardware threads of one core: ranks on two threads of a core slow each
    other down.
    """
    found: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        siblings = parse_cpu_list(_read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")) & cpus
        found.setdefault(min(siblings, default=cpu), set()).add(cpu)
    return [frozenset(found[first]) for first in sorted(found)]


def _near_gpus(local_world_size: int) -> list[frozenset[int]]:
    """Return, by local rank, the CPUs near its GPU; empty unless all ranks' GPUs are visible from here."""
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
