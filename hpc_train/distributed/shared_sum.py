"""An all-reduce in shared memory: averages tensors over the ranks of one node.

``strategies.ddp`` averages gradients with it on the CPU. gloo sends them over TCP, which takes more time
(``python -m benchmarks.node_sum``), of the cores that compute the next gradients.

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
#: The most bytes of a segment of gloo's ring.
_SEGMENT = 1 << 20
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

        Each rank's values are multiplied by 1/R, as DDP does, then added in the order of gloo's ring, so that
        a run has the same results, bitwise, whether its ranks are on one node or on several. Raises
        PeerLostError if a rank has ended, or does not come within the timeout.
        """
        flat = tensor.view(-1)
        block = ring_block(len(flat), flat.element_size(), self._flags.world_size)
        size = _PIECE // flat.element_size()
        for begin in range(0, len(flat), size):
            self._average(flat[begin : begin + size], begin, block)

    def _average(self, piece: Tensor, begin: int, block: int) -> None:
        flags, end = self._flags, begin + len(piece)
        self._turn = (self._turn + 1) % _TURNS
        rows = self._rooms[self._turn].view(piece.dtype)[:, : len(piece)]
        torch.mul(piece, 1 / flags.world_size, out=rows[flags.rank])
        flags.write(0)
        flags.wait()
        for number in range(begin // block, -(-end // block)):
            within = slice(max(number * block - begin, 0), (number + 1) * block - begin)
            first, second, *others = (
                rows[(number - place) % flags.world_size, within] for place in range(1, flags.world_size + 1)
            )
            total = torch.add(first, second, out=piece[within])
            for row in others:
                total.add_(row)


def ring_block(count: int, element_size: int, ranks: int) -> int:
    """Return how many consecutive elements gloo's ring all-reduce adds in the same order.

    It divides ``count`` elements into R blocks, of segments of 1 MiB at most and two at least. The sum of
    block b begins at rank b - 1 and goes down the ranks to b - R, which is b itself (``ring`` in
    gloo/allreduce.cc).
    """
    size = count * element_size
    segments = max(-(-size // _SEGMENT), 2 * ranks)
    each = -(-segments // ranks)
    segment_bytes = -(-size // (each * ranks))
    return each * -(-segment_bytes // element_size)
