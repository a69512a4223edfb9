"""The one DeviceMesh of a run, its axes those of ``config.degrees``: who shares what with whom.

Used by the strategies by which ranks share layers, each of which makes it once.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.config.degrees import AXES
from hpc_train.strategies.base import Placement


def device_mesh(placement: Placement) -> DeviceMesh:
    """Make the mesh of all ranks, of all four axes. Collective."""
    sizes = tuple(getattr(placement.degrees, axis) for axis in AXES)
    return init_device_mesh(placement.device.type, sizes, mesh_dim_names=AXES)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of those who have the same layers as this rank, and other data: what ``fully_shard``
    takes, a first axis of copies only where there are any.
    """
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
