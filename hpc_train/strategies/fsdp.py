"""``strategy: fsdp``: parameters, gradients and optimizer state sharded over all ranks (ZeRO-3)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.strategies.fully_sharded import FullySharded


class FSDPStrategy(FullySharded):
    """Over one axis of all ranks; a block's parameters are gathered twice a micro-batch."""

    name = "fsdp"

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(
            self.context.device.type, (self.context.degrees.shard,), mesh_dim_names=("shard",)
        )
