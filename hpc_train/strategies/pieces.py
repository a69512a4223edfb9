"""Which part of a global tensor a DTensor's rank holds: for checkpoints of every strategy that shards."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.strategies.base import Piece


def piece_of(tensor: DTensor) -> Piece:
    """Return this rank's part; along axes that hold copies the first rank's is the one to save."""
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    with torch.no_grad():
        local = tensor.to_local()
    copied = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    is_first_copy = all(mesh.get_local_rank(axis) == 0 for axis in copied)
    return Piece(tuple(tensor.shape), tuple(offset), local, is_writer=is_first_copy)
