"""The memory that is free on this machine, for models that ``prepare`` builds and tries on a login node."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from hpc_train.run.resource_limits import cgroup_folders, of_process

_GB = 1e9
#: A cgroup's limit, its usage, and the line of memory.stat with reclaimable memory; by version.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Return the free memory of the machine, or of the tightest cgroup of this process."""
    machine = _number_in(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB") or 0
    return max(0, min([machine * 1024, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    for folder in cgroup_folders("memory"):
        for limit_name, use_name, reclaimed in _CGROUP_FILES:
            limit, use = (
                _number_in(folder / limit_name, r"^(\d+)$"),
                _number_in(folder / use_name, r"^(\d+)$"),
            )
            if limit is not None and use is not None:
                yield limit - use + (_number_in(folder / "memory.stat", rf"^{reclaimed} (\d+)$") or 0)


def _number_in(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


@contextmanager
def limited_to_free_memory() -> Iterator[None]:
    """Limit this process's allocations within this context to the memory that is free now."""
    before, hard = of_process(resource.RLIMIT_DATA)
    in_use = (_number_in(Path("/proc/self/status"), r"^VmData:\s+(\d+) kB") or 0) * 1024
    limits = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    _set_data_limit(min([in_use + free_bytes(), *limits]), hard)
    try:
        yield
    finally:
        _set_data_limit(before, hard)


def _set_data_limit(soft: int, hard: int) -> None:
    with suppress(OSError):  # a sandbox refuses it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacking_memory(nbytes: int) -> str | None:
    """Return why weights of this size can't be used on this machine now; None if they can."""
    free = free_bytes()
    if nbytes <= free:
        return None
    return f"its weights have {nbytes / _GB:.1f} GB, and {free / _GB:.1f} GB of memory are free here"


def weight_bytes(model: nn.Module) -> int:
    """Return the size of parameters and buffers, on any device."""
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
