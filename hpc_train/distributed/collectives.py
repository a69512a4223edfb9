"""The number of collective operations that this rank has started: a rank that is behind has started fewer.

On CUDA, started means enqueued by the host. NCCL's flight recorder knows what the device has started only
with TORCH_NCCL_ENABLE_TIMING, with which, according to torch, its own watchdog hangs more often.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def collectives_begun() -> dict[str, int]:
    """Return the number by name of the process group, which is the same on all its ranks. For any thread."""
    found: dict[str, int] = {}
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_initialized() else [])
    with suppress(Exception):  # private, and the main thread may be changing it
        for group in list(distributed_c10d._world.pg_map):
            found[group.group_name] = sum(_begun(group, device) for device in devices)
    return found


def _begun(group: dist.ProcessGroup, device: torch.device) -> int:
    with suppress(RuntimeError):  # the group has no backend for this device
        backend = group._get_backend(device)
        return int(backend._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return 0
