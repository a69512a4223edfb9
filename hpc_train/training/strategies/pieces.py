"""The DeviceMesh of a run, and a rank's part of a DTensor.

The mesh has the axes of ``topology.degrees``. It is created once per process group, however often the model
is built: each NCCL communicator holds device memory until the process group is destroyed. Checkpoints of
every sharding strategy and clipping over ranks read the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hpc_train.experiment.topology.degrees import AXES
from hpc_train.training.distributed.process_group import limit_group
from hpc_train.training.strategies.base import Piece, RankContext

#: The value of ``torch.nn.utils.clip_grad_norm_``.
_EPS = 1e-6


@torch.no_grad()
def piece_of(tensor: DTensor) -> Piece:
    """Return this rank's part; along axes of replicas the first rank saves it."""
    return Piece(tuple(tensor.shape), _offset(tensor), tensor.to_local(), is_writer=_is_first_copy(tensor))


def dealt_pieces(tensor: DTensor, parts: int, ranks: int, rank: int) -> list[Piece]:
    """Return this rank's ``parts`` parts in the plain layout of a tensor; some may be empty.

    In the plain layout the tensor's rows are ``parts`` tensors of equal size, one after the other. Here they
    are ``dealt_out`` to ``ranks``: rank 0's rows of each part first, and so on. Rank ``rank`` owns a range
    of its rows.
    """
    plain = piece_of(tensor)
    rows = tensor.shape[0] // (parts * ranks)
    first = plain.offset[0] - rank * parts * rows
    num_rows = plain.local.shape[0]
    pieces = []
    for part in range(parts):
        begin, end = (min(max(bound, first), first + num_rows) for bound in (part * rows, (part + 1) * rows))
        within = min(max(begin - part * rows, 0), rows)
        offset = (part * ranks + rank) * rows + within
        local = plain.local.narrow(0, begin - first, end - begin)
        pieces.append(Piece(plain.shape, (offset, *plain.offset[1:]), local, plain.is_writer))
    return pieces


def dealt_out(tensor: Tensor, parts: int, ranks: int) -> Tensor:
    """Return a copy with rows ordered so that ``Shard(0)`` gives each of ``ranks`` a share of each part."""
    rows = tensor.shape[0] // (parts * ranks)
    by_part = tensor.unflatten(0, (parts, ranks, rows))
    return by_part.transpose(0, 1).flatten(0, 2).contiguous()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in its memory layout; any other tensor is returned itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's part.

    The axes divide the tensor one after the other, each the previous chunk, like torch.chunk. Axes with a
    ``_StridedShard`` (of fully_shard on layers that are already shared) come last.
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


@torch.no_grad()
def clip_over_ranks(
    parameters: Iterable[Tensor],
    pieces: Callable[[Tensor, Tensor], Sequence[Piece]],
    max_norm: float,
    context: RankContext,
) -> Tensor:
    """Scale gradients so that their L2 norm over all ranks is at most ``max_norm``.

    ``parameters``: the parameters of which this rank has a part, none on some ranks; ``pieces``:
    ``Strategy.pieces``, by which each part counts once. Collective: one all-reduce over all ranks. Returns
    the norm before clipping, shape (), in the parameters' dtype, bitwise identical on all ranks. Non-finite
    norms are returned, not raised.
    """
    trained = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    counted = [
        piece.local for like, gradient in trained for piece in pieces(gradient, like) if piece.is_writer
    ]
    squares = torch.zeros((), dtype=torch.float64, device=context.device)
    if counted:
        # In float64 the square of a float32 norm can't overflow.
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    if context.world_size > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().to(context.precision.param_dtype)
    scale = torch.clamp(max_norm / (norm + _EPS), max=1.0)
    if trained:
        torch._foreach_mul_([local_part(gradient) for _, gradient in trained], scale)
    return norm


T = TypeVar("T")
#: Results of ``made_once``, by the process group of all ranks, of which only one exists at a time.
_made: dict[dist.ProcessGroup | None, dict[Hashable, Any]] = {}


def made_once(key: Hashable, make: Callable[[], T]) -> T:
    """Return the cached result of ``make`` for ``key`` in this process group; drop those of earlier groups.

    Collective if ``make`` is.
    """
    world = dist.group.WORLD
    for gone in _made.keys() - {world}:
        del _made[gone]
    results = _made.setdefault(world, {})
    if key not in results:
        results[key] = make()
    result: T = results[key]
    return result


def mesh_of(context: RankContext, axes: tuple[str, ...] = AXES) -> DeviceMesh:
    """Return the mesh of all ranks with these axes of ``topology.degrees``, or all. Collective."""
    sizes = tuple(getattr(context.degrees, axis) for axis in axes)
    device_type = context.device.type
    return made_once((device_type, sizes, axes), lambda: new_mesh(device_type, sizes, axes))


def new_mesh(device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Create a mesh of all ranks. Collective. Real also in ``training.memory_prediction``'s fake mode."""
    with unset_fake_temporarily():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        for group in mesh.get_all_groups():
            limit_group(group)
        return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks with this rank's layers and different data, for ``fully_shard``.

    It has a first axis of replicas only if there are replicas.
    """
    has_copies = part_of(mesh, "replicate").size() > 1
    return part_of(mesh, "replicate", "shard") if has_copies else part_of(mesh, "shard")


def part_of(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the mesh of these axes of ``mesh``, the same object each time.

    torch caches the sharding of DTensors by equal meshes, with the mesh, and its compiler does not find an
    equal mesh that is another object: after a build with other degrees a model could not be compiled.
    """
    return made_once((mesh, axes), lambda: mesh[axes])
