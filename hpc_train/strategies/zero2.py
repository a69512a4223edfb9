"""``strategy: zero2``: as fsdp, but a block keeps its gathered parameters until its backward is done."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.strategies.fully_sharded import FullySharded


class ZeRO2Strategy(FullySharded):
    """Gathers once a micro-batch where fsdp gathers twice, for the memory of a whole model's parameters."""

    name = "zero2"
    reshard_after_forward = False

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(
            self.context.device.type, (self.context.degrees.shard,), mesh_dim_names=("shard",)
        )
