"""``strategy: fsdp``: parameters, gradients and optimizer state sharded over all ranks (FSDP2, by block)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.errors import BadFileError
from hpc_train.strategies.base import Piece, Placement
from hpc_train.strategies.data_parallel import DataParallel


class FSDPStrategy(DataParallel):
    """torch's ``fully_shard`` of each block, then of the rest."""

    casts = True

    def __init__(self, placement: Placement) -> None:
        if placement.args:
            raise BadFileError(f"parallel.args: fsdp takes none; take {next(iter(placement.args))!r} out")
        super().__init__(placement)

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        precision = self.placement.precision
        if precision.is_mixed and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
        ):
            raise BadFileError(
                f"precision: {precision.name} does not work with BatchNorm under fsdp; "
                "write fp32, or parallel.strategy: ddp"
            )
        mesh = init_device_mesh(self.placement.device.type, (self.placement.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=precision.compute_dtype, reduce_dtype=precision.param_dtype)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.wrapped, FSDPModule)
        self.wrapped.set_requires_gradient_sync(is_last)
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> Tensor:
        norm = super().clip_gradients(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def piece(self, tensor: Tensor) -> Piece:
        if not isinstance(tensor, DTensor):
            return super().piece(tensor)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        with torch.no_grad():
            local = tensor.to_local()
        return Piece(tuple(tensor.shape), tuple(offset), local, is_writer=True)
