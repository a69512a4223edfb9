"""Tensor parallelism: which linear layers ranks share, and how what a rank has of them is saved.

Called by ``tensor`` on the whole model and by ``pipeline`` on a stage. A pair of linear layers is shared as
Megatron-LM has it (Shoeybi et al. 2019, arXiv:1909.08053): the first by columns, that is by what it computes,
so that a rank has some heads, or some of an MLP's hidden width; the second by rows, its results summed over
ranks. Everything else is whole on all ranks, which compute it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.strategies.base import Piece
from hpc_train.strategies.pieces import dealt_out, dealt_pieces, local_part, piece_of
from hpc_train.strategies.tensor_layers import Shareable, numbers_shared, shareable_in
from hpc_train.validate.layer_rules import dropped_attention, uneven_share

_AXIS = "tensor"


@dataclass
class TensorPlan:
    """What a rank shares with those of ``mesh``, the 1-D mesh "tensor"."""

    mesh: DeviceMesh
    #: Layers whose rows are several tensors, like q, k and v, and how many.
    _dealt: list[tuple[nn.Linear, int]] = field(default_factory=list)
    #: id of a parameter → how many tensors its rows are.
    _parts: dict[int, int] = field(default_factory=dict)

    def note_parameters(self) -> None:
        """Remember which parameters are dealt out: after ``fully_shard``, which replaces them."""
        self._parts = {
            id(parameter): parts for layer, parts in self._dealt for parameter in layer.parameters()
        }

    def pieces(self, tensor: DTensor, like: Tensor) -> list[Piece]:
        """Return ``Strategy.pieces`` of a DTensor: of the parameter ``like`` or of what is kept for it."""
        parts = self._parts.get(id(like), 1)
        rank = self.mesh.get_local_rank()
        if parts > 1 and tensor.dim() > 0 and tensor.shape[0] == like.shape[0]:
            return dealt_pieces(tensor, parts, self.mesh.size(), rank)
        piece = piece_of(tensor)
        # What is whole on all ranks of the mesh knows nothing of it, as a DTensor.
        is_copy = rank > 0 and not _is_shared(tensor)
        return [replace(piece, is_writer=piece.is_writer and not is_copy)]


def refuse_unshared(model: nn.Module, ranks: int, otherwise: str) -> None:
    """Raise BadFileError where this number of ranks can't share ``model``, or not evenly.

    Of the whole model, so that all ranks refuse alike, whichever stage they have. Not collective.
    ``otherwise``: what to write then in place of ``parallel.tensor``.
    """
    if ranks == 1:
        return
    found = shareable_in(model)
    if not found:
        raise BadFileError(
            f"parallel.tensor: {type(model).__name__} has no layers that {ranks} ranks can share; "
            f"{otherwise}, or give a module's class a method tensor_plan()"
        )
    _check(found, ranks)


def share_layers(model: nn.Module, mesh: DeviceMesh, within: nn.Module | None = None) -> TensorPlan:
    """Share the linear layers of ``model``, or of a stage of one, over the 1-D ``mesh`` "tensor", in place.

    After ``refuse_unshared``, before ``fully_shard``. Not collective: every rank passes the same weights and
    keeps its part. Modules and names stay; nothing is shared over a mesh of one rank. ``within``: the model
    that a stage is of.
    """
    plan = TensorPlan(mesh)
    if mesh.size() == 1:
        return plan
    for each in shareable_in(model, within).values():
        plan._dealt += _share(each, mesh)
    return plan


@torch.no_grad()
def even_out(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Give the gradients of what is whole on all ranks of ``mesh`` the first one's bits. Collective over it.

    They are computed from the same numbers, but on a GPU not always by the same algorithm, nor added up in
    the same order.
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


def _check(found: Mapping[str, Shareable], ranks: int) -> None:
    """Raise BadFileError where ``ranks`` ranks can't share these layers."""
    if problem := uneven_share(numbers_shared(found), ranks):
        raise problem.as_error()
    for each in found.values():
        if each.attention_dropout > 0:
            raise dropped_attention(each.attention_key, ranks).as_error()


def _share(found: Shareable, mesh: DeviceMesh) -> list[tuple[nn.Linear, int]]:
    """Share one module's layers; return those whose rows are dealt out, and of how many tensors they are."""
    ranks, module = mesh.size(), found.module
    dealt = [(found.linear(layer), parts) for layer, parts in found.columns.items() if parts > 1]
    for linear, parts in dealt:
        for parameter in linear.parameters():
            parameter.data = dealt_out(parameter.data, parts, ranks)
    styles = {
        **dict.fromkeys(found.columns, ColwiseParallel()),
        **dict.fromkeys(found.rows, RowwiseParallel()),
    }
    parallelize_module(module, mesh, styles, src_data_rank=None)
    for attribute in (*found.heads, *found.widths):
        setattr(module, attribute, getattr(module, attribute) // ranks)
    for name in found.dropouts:
        plain = module.get_submodule(name)
        assert isinstance(plain, nn.Dropout)
        module.set_submodule(name, _SharedDropout(plain, mesh))
    return dealt


class _SharedDropout(nn.Module):
    """Drops of a rank's own columns what plain training drops: the random streams of all ranks are the same.

    (..., columns) → the same. Draws for the columns of all ranks.
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
