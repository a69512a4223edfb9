"""``strategy: hsdp``: sharded within groups of ranks (mostly a node), the groups replicas of each other."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.strategies.fully_sharded import FullySharded


class HSDPStrategy(FullySharded):
    """Gathers within a group only; between groups gradient shards are averaged."""

    name = "hsdp"

    def mesh(self) -> DeviceMesh:
        degrees = self.placement.degrees
        shape, names = (degrees.replicate, degrees.shard), ("replicate", "shard")
        return init_device_mesh(self.placement.device.type, shape, mesh_dim_names=names)
