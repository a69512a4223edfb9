"""Which part of a global tensor a DTensor's rank owns: for checkpoints of every sharding strategy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hpc_train.strategies.base import Piece


@torch.no_grad()
def piece_of(tensor: DTensor) -> Piece:
    """Return this rank's part; along axes that hold copies the first rank's is the one to save."""
    return Piece(tuple(tensor.shape), _offset(tensor), tensor.to_local(), is_writer=_is_first_copy(tensor))


def dealt_pieces(tensor: DTensor, parts: int, ranks: int, rank: int) -> list[Piece]:
    """Return this rank's parts, ``parts`` of them, in a tensor's plain layout: some may be empty.

    The tensor's rows are ``parts`` tensors of as many rows, one after the other in the plain layout. Here
    they are ``dealt_out`` to ``ranks``: first the rows of rank 0, of each part; this rank, of number
    ``rank``, holds a range of its own ones.
    """
    plain = piece_of(tensor)
    rows = tensor.shape[0] // (parts * ranks)
    first = plain.offset[0] - rank * parts * rows
    held = plain.local.shape[0]
    found = []
    for part in range(parts):
        begin, end = (min(max(bound, first), first + held) for bound in (part * rows, (part + 1) * rows))
        within = min(max(begin - part * rows, 0), rows)
        offset = (part * ranks + rank) * rows + within
        local = plain.local.narrow(0, begin - first, end - begin)
        found.append(Piece(plain.shape, (offset, *plain.offset[1:]), local, plain.is_writer))
    return found


def dealt_out(tensor: Tensor, parts: int, ranks: int) -> Tensor:
    """Return the rows in the order in which ``Shard(0)`` gives each of ``ranks`` its share of each of
    ``parts``: a copy.
    """
    rows = tensor.shape[0] // (parts * ranks)
    by_part = tensor.unflatten(0, (parts, ranks, rows))
    return by_part.transpose(0, 1).flatten(0, 2).contiguous()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in its memory layout, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offset(tensor: DTensor) -> tuple[int, ...]:
    """Return where this rank's part begins.

    Axes cut one after the other, each what the one before has left, into as even chunks as torch.chunk; those
    of a ``_StridedShard`` (where fully_shard meets layers that are shared already) come last.
    """
    sizes, offset = list(tensor.shape), [0] * tensor.dim()
    for axis in sorted(
        range(len(tensor.placements)), key=lambda axis: isinstance(tensor.placements[axis], _StridedShard)
    ):
        placement = tensor.placements[axis]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim = placement.dim
        chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
        first = min(chunk * tensor.device_mesh.get_local_rank(axis), sizes[dim])
        sizes[dim] = min(chunk, sizes[dim] - first)
        offset[dim] += first
    assert tuple(sizes) == tuple(tensor.to_local().shape), (sizes, tensor)
    return tuple(offset)


def _is_first_copy(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    copied = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == 0 for axis in copied)
