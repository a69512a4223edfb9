"""Slices of whole tensors, one per rank, and gathering all of them on all ranks.

Used by ``zero1``. Legend: R ranks; slice r of a tensor of d rows is rows r⌈d/R⌉ … (r+1)⌈d/R⌉, as
``torch.chunk`` and DTensor's ``Shard(0)`` have it: the last ones may be shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

#: What one collective brings to a rank: enough to be fast, little beside a model (assumed).
BUCKET_BYTES = 32 << 20


def own_slice(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a view of the rank's rows."""
    return _Rows(whole, 0, _slice_rows(whole, world_size)).of(rank, world_size)


@torch.no_grad()
def gather_slices(
    tensors: Sequence[Tensor], rank: int, world_size: int, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Overwrite each rank's slice of every tensor by that rank's. Collective over all ranks."""
    for bucket in _buckets(tensors, world_size, bucket_bytes):
        first = bucket[0].whole
        sizes = [rows.numel for rows in bucket]
        gathered = first.new_empty((world_size, sum(sizes)))
        own = first.new_zeros(sum(sizes))
        for rows, place in zip(bucket, own.split(sizes), strict=True):
            _copy(place, rows.of(rank, world_size), into_flat=True)
        dist.all_gather_into_tensor(gathered.view(-1), own)
        for other in (number for number in range(world_size) if number != rank):
            for rows, place in zip(bucket, gathered[other].split(sizes), strict=True):
                _copy(place, rows.of(other, world_size), into_flat=False)


@dataclass(frozen=True)
class _Rows:
    """Rows ``begin`` to ``begin + count`` of every rank's slice of ``whole``."""

    whole: Tensor
    begin: int
    count: int

    @property
    def numel(self) -> int:
        return self.count * (self.whole[:1].numel())

    def of(self, rank: int, world_size: int) -> Tensor:
        """Return a view of them in one rank's slice: fewer rows where that slice is shorter."""
        size, length = _slice_rows(self.whole, world_size), self.whole.shape[0]
        begin = min(rank * size + self.begin, length)
        end = min(begin + self.count, length)
        return self.whole.detach()[begin:end]


def _slice_rows(whole: Tensor, world_size: int) -> int:
    return -(-whole.shape[0] // world_size)


def _copy(flat: Tensor, rows: Tensor, *, into_flat: bool) -> None:
    """Copy between ``rows`` and the beginning of ``flat``, which is longer where rows are missing."""
    beginning = flat[: rows.numel()].view(rows.shape)
    if into_flat:
        beginning.copy_(rows)
    else:
        rows.copy_(beginning)


def _buckets(tensors: Sequence[Tensor], world_size: int, bucket_bytes: int) -> Iterator[list[_Rows]]:
    """Yield rows of one dtype and device that fit into this number of bytes over all ranks' slices.

    One row of each rank is never split.
    """
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    for kind in kinds:
        bucket: list[_Rows] = []
        left = bucket_bytes
        for tensor in (each for each in tensors if (each.dtype, each.device) == kind and each.numel()):
            row_bytes = tensor[:1].nbytes * world_size
            begin, size = 0, _slice_rows(tensor, world_size)
            while begin < size:
                if bucket and left < row_bytes:
                    yield bucket
                    bucket, left = [], bucket_bytes
                count = min(size - begin, max(1, left // row_bytes))
                bucket.append(_Rows(tensor, begin, count))
                begin, left = begin + count, left - count * row_bytes
        if bucket:
            yield bucket
