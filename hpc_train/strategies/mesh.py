"""The one DeviceMesh of a run, its axes those of ``topology.degrees``: who shares what with whom.

Made once a process group, however often the model is built: each NCCL communicator holds device memory until
the process group is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.distributed.process_group import limit_group
from hpc_train.strategies.base import RankContext
from hpc_train.topology.degrees import AXES

T = TypeVar("T")
#: By process group of all ranks, of which there is one at a time: what ``made_once`` has made of it.
_made: dict[dist.ProcessGroup | None, dict[Hashable, Any]] = {}


def made_once(key: Hashable, make: Callable[[], T]) -> T:
    """Return what ``make`` returned for ``key`` in this process group; what another one had is forgotten.

    Collective where ``make`` is.
    """
    world = dist.group.WORLD
    for gone in _made.keys() - {world}:
        del _made[gone]
    known = _made.setdefault(world, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


def mesh_of(context: RankContext, axes: tuple[str, ...] = AXES) -> DeviceMesh:
    """Return the mesh of all ranks with these axes of ``topology.degrees``, or all. Collective."""
    sizes = tuple(getattr(context.degrees, axis) for axis in axes)
    device_type = context.device.type
    return made_once((device_type, sizes, axes), lambda: new_mesh(device_type, sizes, axes))


def new_mesh(device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh of all ranks. Collective. ``training.memory_prediction`` has no tensors with data but
    these.
    """
    with unset_fake_temporarily():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        for group in mesh.get_all_groups():
            limit_group(group)
        return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of those who have the same layers as this rank, and other data: what ``fully_shard``
    takes, a first axis of copies only where there are any.
    """
    has_copies = part_of(mesh, "replicate").size() > 1
    return part_of(mesh, "replicate", "shard") if has_copies else part_of(mesh, "shard")


def part_of(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the mesh of these axes of ``mesh``, the same object each time.

    torch remembers how DTensors of equal meshes are sharded, meshes included, and its compiler does not find
    an equal mesh that is another object: after a build with other degrees a model could not be compiled.
    """
    return made_once((mesh, axes), lambda: mesh[axes])
