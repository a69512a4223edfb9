"""The DeviceMesh of a run, with the axes of ``topology.degrees``.

Created once per process group, however often the model is built: each NCCL communicator holds device memory
until the process group is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.experiment.topology.degrees import AXES
from hpc_train.training.distributed.process_group import limit_group
from hpc_train.training.strategies.base import RankContext

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
