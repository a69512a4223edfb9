"""Rank 0's buffers are the run's: how they reach the other ranks, and how a forward leaves them alone.

Used by the data-parallel strategies. Buffers that are not saved (``persistent=False``) are constants and
stay out of all this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return name → buffer of all that ``state_dict`` holds, each tensor once."""
    return {name: buffer for _, name, buffer in _persistent(model)}


def training_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers that a training forward may read: all but BatchNorm's statistics."""
    return {name: buffer for module, name, buffer in _persistent(model) if not isinstance(module, _BatchNorm)}


def _persistent(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield module, f"{prefix}.{name}" if prefix else name, buffer


@torch.no_grad()
def broadcast_from_rank_0(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Overwrite every rank's ``buffers`` by rank 0's, or those of ``group`` by rank ``source``'s.

    Collective in the group, which is all ranks if None: one broadcast a dtype and device.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        alike[buffer.dtype, buffer.device].append(buffer)
    for tensors in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=source, group=group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put the persistent buffers back as they were: for a forward whose result does not count."""
    buffers = list(persistent_buffers(model).values())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
