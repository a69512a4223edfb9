"""How much memory a trial may take, so that what does not fit is refused instead of killed.

On the CPU the kernel grants more than there is, and kills later, and not always who asked. So a trial's
process limits itself to the rank's share of what is free, and ``prepare`` to what is free.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import torch

from hpc_train.run.resource_limits import of_process

#: Of what is free; the rest is for loader processes, evaluation and fragmentation. Assumed.
_PART = 0.9
_CGROUPS = Path("/sys/fs/cgroup")
#: Limit, use, and the line of memory.stat that says what of it the kernel gives back when asked.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def limit_memory(device: torch.device, num_sharing: int) -> None:
    """Let this process allocate its share of what is free now and no more, for good.

    ``num_sharing``: ranks of this node that share its memory; a GPU is a rank's own.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(free * _PART / total, device)
        return
    _limit_data(int(free_bytes() * _PART / num_sharing))


@contextmanager
def limited_to_free_memory() -> Iterator[None]:
    """Let this process allocate what is free now and no more, within this context."""
    before, hard = of_process(resource.RLIMIT_DATA)
    _limit_data(free_bytes())
    try:
        yield
    finally:
        _set_data_limit(before, hard)


def _limit_data(more: int) -> None:
    """Let this process allocate ``more`` bytes at most on top of what it has."""
    soft, hard = of_process(resource.RLIMIT_DATA)
    given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    _set_data_limit(min([_data_bytes() + more, *given]), hard)


def _set_data_limit(soft: int, hard: int) -> None:
    with suppress(OSError):  # a sandbox refuses it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def free_bytes() -> int:
    """Return what memory the machine, or the tightest cgroup around this process, has left."""
    machine = _number(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB")
    return max(0, min([(machine or 0) * 1024, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controllers == "memory":
            root, names = (_CGROUPS, _V2) if number == "0" else (_CGROUPS / "memory", _V1)
            own = PurePosixPath(path.lstrip("/"))
            # In a container the path may be the host's; then only the root is there.
            for folder in {root / own, *(root / parent for parent in own.parents), root}:
                yield from _free_in(folder, *names)


def _free_in(folder: Path, limit_name: str, use_name: str, reclaimed: str) -> Iterator[int]:
    limit, use = _number(folder / limit_name, r"^(\d+)$"), _number(folder / use_name, r"^(\d+)$")
    if limit is not None and use is not None:
        yield limit - use + (_number(folder / "memory.stat", rf"^{reclaimed} (\d+)$") or 0)


def _data_bytes() -> int:
    """Return what counts against RLIMIT_DATA."""
    return (_number(Path("/proc/self/status"), r"^VmData:\s+(\d+) kB") or 0) * 1024


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])
