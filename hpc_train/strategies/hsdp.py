"""``strategy: hsdp``: sharded within groups of ranks (mostly a node), the groups replicas of each other."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from hpc_train.strategies.fully_sharded import FullySharded
from hpc_train.strategies.mesh import mesh_of


class HSDPStrategy(FullySharded):
    """Gathers within a group only; between groups gradient shards are averaged."""

    name = "hsdp"

    def mesh(self) -> DeviceMesh:
        return mesh_of(self.context, ("replicate", "shard"))
