"""An all-reduce in shared memory: averages tensors over the ranks of one node.

``strategies.ddp`` averages gradients with it on the CPU. gloo sends them over TCP, which takes more time
(``python -m benchmarks.node_sum``) on the cores that compute the next gradients.

Legend: R ranks.
"""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.training.distributed.shared_flags import SharedFlags, open_shared_flags

#: Bytes that are averaged at once; they fit into a core's cache.
_PIECE = 1 << 20
#: Maximum bytes of a segment of gloo's ring.
_SEGMENT = 1 << 20
#: Double buffering: no rank writes the piece after the next before all have read this piece.
_TURNS = 2
#: Every rank reads the values of all ranks, so its work grows with their number (measured up to this number).
_MOST_RANKS = 8
#: On these machines every core sees another core's data before the number that announces them.
_ORDERED_STORES = ("x86_64", "AMD64")


def open_shared_sum(
    rank: int, world_size: int, control: dist.ProcessGroup, silence_s: float
) -> SharedSum | None:
    """Return an average over all ranks, which are on one node; None on all if gloo must be used. Collective.

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

        Each rank's values are multiplied by 1/R, like in DDP, then added in the order of gloo's ring. Results
        are therefore bitwise identical for ranks on one node and on several. Raises PeerLostError if a rank
        has ended or does not arrive within the timeout.
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
    """Return the number of consecutive elements that gloo's ring all-reduce adds in the same order.

    gloo divides ``count`` elements into R blocks of at least two segments, each at most 1 MiB. The sum of
    block b begins at rank b - 1 and descends to rank b - R = b (``ring`` in gloo/allreduce.cc).
    """
    size = count * element_size
    segments = max(-(-size // _SEGMENT), 2 * ranks)
    per_rank = -(-segments // ranks)
    segment_bytes = -(-size // (per_rank * ranks))
    return per_rank * -(-segment_bytes // element_size)
