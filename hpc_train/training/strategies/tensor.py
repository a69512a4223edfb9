"""``strategy: tensor``: neighbouring ranks share linear layers; data parallelism is that of ``fsdp``.

A pair of linear layers is shared as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): the first by
columns, that is by outputs, so that a rank has some heads or a part of an MLP's hidden width; the second by
rows, its results summed over ranks. Everything else is whole on all ranks, which all compute it. ``pipeline``
shares the layers of a stage in the same way. ``TensorPlan`` maps a rank's part to saved pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.experiment.validate.layer_rules import dropped_attention, uneven_share
from hpc_train.training.datasets.types import Batch
from hpc_train.training.strategies.base import Forward, Piece, RankContext
from hpc_train.training.strategies.fully_sharded import FullySharded
from hpc_train.training.strategies.pieces import (
    data_mesh,
    dealt_out,
    dealt_pieces,
    local_part,
    mesh_of,
    part_of,
    piece_of,
)
from hpc_train.training.strategies.tensor_layers import Shareable, numbers_shared, shareable_in

_AXIS = "tensor"


@dataclass
class TensorPlan:
    """The layers that a rank shares with the ranks of ``mesh``, the 1-D mesh "tensor"."""

    mesh: DeviceMesh
    #: Layers whose rows are several tensors, like q, k and v, and the number of tensors.
    _dealt: list[tuple[nn.Linear, int]] = field(default_factory=list)
    #: id of a parameter → the number of tensors in its rows.
    _parts: dict[int, int] = field(default_factory=dict)

    def note_parameters(self) -> None:
        """Record the parameters that are dealt out. After ``fully_shard``, which replaces parameters."""
        self._parts = {
            id(parameter): parts for layer, parts in self._dealt for parameter in layer.parameters()
        }

    def pieces(self, tensor: DTensor, like: Tensor) -> list[Piece]:
        """Return ``Strategy.pieces`` of a DTensor: the parameter ``like`` or a tensor that belongs to it."""
        parts = self._parts.get(id(like), 1)
        rank = self.mesh.get_local_rank()
        if parts > 1 and tensor.dim() > 0 and tensor.shape[0] == like.shape[0]:
            return dealt_pieces(tensor, parts, self.mesh.size(), rank)
        piece = piece_of(tensor)
        # A DTensor that is whole on all ranks of this mesh is not a DTensor over this mesh.
        is_copy = rank > 0 and not _is_shared(tensor)
        return [replace(piece, is_writer=piece.is_writer and not is_copy)]


def refuse_unshared(model: nn.Module, ranks: int, otherwise: str) -> None:
    """Raise BadFileError if this number of ranks can't share ``model`` evenly.

    ``model``: the whole model, so that all ranks raise the same error, whichever stages they own.
    ``otherwise``: the remedy instead of ``parallel.tensor``. Not collective.
    """
    if ranks == 1:
        return
    by_module = shareable_in(model)
    if not by_module:
        raise BadFileError(
            f"parallel.tensor: {type(model).__name__} has no layers that {ranks} ranks can share; "
            f"{otherwise}, or give a module's class a method tensor_plan()"
        )
    _check(by_module, ranks)


def share_layers(model: nn.Module, mesh: DeviceMesh, within: nn.Module | None = None) -> TensorPlan:
    """Share the linear layers of ``model``, or of a stage, over the 1-D ``mesh`` "tensor", in place.

    After ``refuse_unshared``, before ``fully_shard``. Not collective: every rank passes the same weights and
    keeps its part. Modules and names are unchanged; a mesh of one rank shares nothing. ``within``: the model
    of a stage.
    """
    plan = TensorPlan(mesh)
    if mesh.size() == 1:
        return plan
    for shareable in shareable_in(model, within).values():
        plan._dealt += _share(shareable, mesh)
    return plan


@torch.no_grad()
def even_out(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Copy the first rank's gradients of unshared tensors to all ranks of ``mesh``. Collective over it.

    They are computed from the same values, but on a GPU not always by the same algorithm or in the same
    order.
    """
    parts = [local_part(p.grad) for p in parameters if p.grad is not None and not _is_shared(p)]
    for dtype in dict.fromkeys(part.dtype for part in parts):
        alike = [part for part in parts if part.dtype == dtype]
        flat = torch.cat([part.reshape(-1) for part in alike])
        dist.broadcast(flat, group=mesh.get_group(), group_src=0)
        for part, value in zip(alike, flat.split([part.numel() for part in alike]), strict=True):
            part.copy_(value.view_as(part))


def _is_shared(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and _AXIS in (tensor.device_mesh.mesh_dim_names or ())


def _check(by_module: Mapping[str, Shareable], ranks: int) -> None:
    """Raise BadFileError if ``ranks`` ranks can't share these layers."""
    if problem := uneven_share(numbers_shared(by_module), ranks):
        raise problem.as_error()
    for shareable in by_module.values():
        if shareable.attention_dropout > 0:
            raise dropped_attention(shareable.attention_key, ranks).as_error()


def _share(shareable: Shareable, mesh: DeviceMesh) -> list[tuple[nn.Linear, int]]:
    """Share one module's layers; return the layers whose rows are dealt out, and their numbers of tensors."""
    ranks, module = mesh.size(), shareable.module
    dealt = [(shareable.linear(layer), parts) for layer, parts in shareable.columns.items() if parts > 1]
    for linear, parts in dealt:
        for parameter in linear.parameters():
            parameter.data = dealt_out(parameter.data, parts, ranks)
    styles = {
        **dict.fromkeys(shareable.columns, ColwiseParallel()),
        **dict.fromkeys(shareable.rows, RowwiseParallel()),
    }
    parallelize_module(module, mesh, styles, src_data_rank=None)
    for attribute in (*shareable.heads, *shareable.widths):
        setattr(module, attribute, getattr(module, attribute) // ranks)
    for name in shareable.dropouts:
        plain = module.get_submodule(name)
        assert isinstance(plain, nn.Dropout)
        module.set_submodule(name, _SharedDropout(plain, mesh))
    return dealt


class _SharedDropout(nn.Module):
    """Dropout on a rank's columns, equal to that of plain training: all ranks have the same random streams.

    Shape (..., columns), unchanged. Draws for the columns of all ranks.
    """

    def __init__(self, plain: nn.Dropout, mesh: DeviceMesh) -> None:
        super().__init__()
        self.p = plain.p
        self.training = plain.training
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        width = x.shape[-1]
        factors = functional.dropout(x.new_ones(*x.shape[:-1], self._ranks * width), self.p)
        return x * factors.narrow(-1, self._rank * width, width)


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
