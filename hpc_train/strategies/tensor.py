"""``strategy: tensor``: neighbouring ranks share linear layers; data parallelism is that of ``fsdp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hpc_train.datasets.types import Batch
from hpc_train.strategies.base import Forward, Piece, RankContext
from hpc_train.strategies.fully_sharded import FullySharded
from hpc_train.strategies.mesh import data_mesh, mesh_of, part_of
from hpc_train.strategies.tensor_plan import even_out, refuse_unshared, share_layers


class TensorStrategy(FullySharded):
    """Ranks of a ``tensor`` group compute the same micro-batches, each rank its part of the shared layers.

    ``fully_shard`` over the ranks with the same part, perhaps a single rank, casts to the compute dtype and
    averages gradients. Layers that are not shared are computed by all ranks of a group, from the same inputs
    and random streams; the gradients of the first rank count.
    """

    name = "tensor"

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.owns_loss = context.degrees.tensor_rank(context.rank) == 0

    @override
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        self._mesh = mesh_of(self.context)
        refuse_unshared(model, self.context.degrees.tensor, "write strategy: fsdp")
        self._plan = share_layers(model, part_of(self._mesh, "tensor"))
        wrapped = super().wrap(model, blocks)
        self._plan.note_parameters()
        return wrapped

    @override
    def mesh(self) -> DeviceMesh:
        return data_mesh(self._mesh)

    @override
    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        total = super().accumulate(batches, forward)
        if self.context.degrees.tensor > 1:
            even_out(self.optimized().values(), part_of(self._mesh, "tensor"))
        return total if self.owns_loss else torch.zeros_like(total)

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """Return the rank's pieces; for a layer whose rows are q, k and v, a range of each."""
        return (
            self._plan.pieces(tensor, like) if isinstance(tensor, DTensor) else super().pieces(tensor, like)
        )
