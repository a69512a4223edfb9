"""Averages tensors over the ranks of one node in memory that they share.

``strategies.ddp`` averages gradients with it on the CPU. gloo sends them over TCP, which takes at least twice
as long (``python -m benchmarks.node_sum``), on the cores that compute the next gradients.

Legend: R ranks.
"""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.distributed.shared_flags import SharedFlags, open_shared_flags

#: Bytes that are averaged at once: they stay in a core's cache meanwhile.
_PIECE = 1 << 20
#: Double buffering: no rank writes the piece after the next before all have read this one.
_TURNS = 2
#: Every rank reads what all wrote, so the work of each grows with their number (measured up to this one).
_MOST_RANKS = 8
#: Here every core sees the data of another before the number that announces them.
_ORDERED_STORES = ("x86_64", "AMD64")


def open_shared_sum(
    rank: int, world_size: int, control: dist.ProcessGroup, silence_s: float
) -> SharedSum | None:
    """Return what averages over all ranks, which are on one node; None on all where gloo is to be used.
    Collective.

    ``silence_s``: the timeout for a rank that is alive.
    """
    if world_size > _MOST_RANKS or platform.machine() not in _ORDERED_STORES:
        return None
    room = _TURNS * world_size * _PIECE
    flags = open_shared_flags(rank, world_size, control, silence_s, room)
    return None if flags is None else SharedSum(flags)


class SharedSum:
    """The shared memory of all ranks. For one thread of a rank."""

    def __init__(self, flags: SharedFlags) -> None:
        self._flags = flags
        rooms = torch.frombuffer(flags.room, dtype=torch.uint8)
        self._rooms = rooms.view(_TURNS, flags.world_size, _PIECE)
        self._turn = 0

    def average(self, tensor: Tensor) -> None:
        """Replace a contiguous floating-point tensor on the CPU by its mean over the ranks. Collective.

        Each rank's values are divided by R, then added in the order of the ranks: the means are bitwise
        identical on all, and for two ranks those of gloo. Raises PeerLostError if a rank has ended, or does
        not come within the timeout.
        """
        for piece in tensor.view(-1).split(_PIECE // tensor.element_size()):
            self._average(piece)

    def _average(self, piece: Tensor) -> None:
        flags = self._flags
        self._turn = (self._turn + 1) % _TURNS
        rows = self._rooms[self._turn].view(piece.dtype)[:, : len(piece)]
        torch.mul(piece, 1 / flags.world_size, out=rows[flags.rank])
        flags.write(0)
        flags.wait()
        torch.add(rows[0], rows[1], out=piece)
        for row in rows[2:]:
            piece.add_(row)
