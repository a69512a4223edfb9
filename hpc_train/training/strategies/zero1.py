"""``strategy: zero1``: like ddp, but each rank owns the optimizer state of one slice of each parameter.

Legend: R ranks; slice r of a tensor of d rows is rows r⌈d/R⌉ … (r+1)⌈d/R⌉, like in ``torch.chunk`` and
DTensor's ``Shard(0)``. The last slices may be shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from hpc_train.training.datasets.types import Batch
from hpc_train.training.strategies.base import Forward
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.strategies.pieces import new_mesh

#: Bytes that one collective brings to a rank: enough to be fast, and little compared to a model (assumed).
BUCKET_BYTES = 32 << 20


class ZeRO1Strategy(DDPStrategy):
    """ZeRO stage 1 (Rajbhandari et al. 2019, arXiv:1910.02054): only the optimizer's state is sharded.

    The optimizer gets DTensors whose local part is a view of the model's parameter, so that an updated slice
    needs no copy on this rank, only on the others.
    """

    name = "zero1"

    @override
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        wrapped = super().wrap(model, blocks)
        self._whole = super().optimized()
        self._slices = self._whole
        if self.context.world_size > 1:
            mesh = new_mesh(self.context.device.type, (self.context.world_size,), ("shard",))
            self._slices = {name: nn.Parameter(_sliced(value, mesh)) for name, value in self._whole.items()}
        return wrapped

    def optimized(self) -> dict[str, nn.Parameter]:
        """Return this rank's slices; the parameters themselves on a single rank."""
        return dict(self._slices)

    @override
    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        # The optimizer resets only the gradients of the slices.
        for parameter in self._whole.values():
            parameter.grad = None
        total = super().accumulate(batches, forward)
        for whole, part in self._pairs():
            part.grad = None if whole.grad is None else _sliced(whole.grad, part.device_mesh)
        return total

    def weights_changed(self) -> None:
        """Gather the slices that the ranks' optimizers have updated into every rank's model. Collective."""
        sharded = [whole for whole, part in self._pairs() if part.placements == (Shard(0),)]
        if sharded:
            gather_slices(sharded, self.context.rank, self.context.world_size)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the slices only: the whole gradients are not unscaled under fp16, and are not read again."""
        parameters = [part for part in self._slices.values() if part.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _pairs(self) -> Iterator[tuple[nn.Parameter, DTensor]]:
        """Yield each parameter with its slice; nothing on a single rank."""
        for name, part in self._slices.items():
            if isinstance(part, DTensor):
                yield self._whole[name], part


@torch.no_grad()
def _sliced(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor over a view of this rank's slice, or of the whole if slices are not contiguous."""
    # Fused kernels need dim 0 to be outermost in memory; transposed rows have gaps.
    has_rows = whole.dim() > 0 and whole.stride(0) * whole.shape[0] >= whole.numel()
    placement: Placement = Shard(0) if has_rows else Replicate()
    is_sharded = placement.is_shard()
    local = own_slice(whole, mesh.get_local_rank(), mesh.size()) if is_sharded else whole.detach()
    return DTensor.from_local(
        local, mesh, (placement,), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def own_slice(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a view of the rank's rows."""
    return _Rows(whole, 0, _slice_rows(whole, world_size)).of(rank, world_size)


@torch.no_grad()
def gather_slices(
    tensors: Sequence[Tensor], rank: int, world_size: int, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Overwrite each rank's slice of every tensor by that rank's. Collective over all ranks."""
    for bucket in _buckets(tensors, world_size, bucket_bytes):
        first = bucket[0].whole
        sizes = [rows.numel for rows in bucket]
        gathered = first.new_empty((world_size, sum(sizes)))
        sent = first.new_zeros(sum(sizes))
        for rows, place in zip(bucket, sent.split(sizes), strict=True):
            _copy(place, rows.of(rank, world_size), into_flat=True)
        dist.all_gather_into_tensor(gathered.view(-1), sent)
        for other in (number for number in range(world_size) if number != rank):
            for rows, place in zip(bucket, gathered[other].split(sizes), strict=True):
                _copy(place, rows.of(other, world_size), into_flat=False)


@dataclass(frozen=True)
class _Rows:
    """Rows ``begin`` to ``begin + count`` of every rank's slice of ``whole``."""

    whole: Tensor
    begin: int
    count: int

    @property
    def numel(self) -> int:
        return self.count * (self.whole[:1].numel())

    def of(self, rank: int, world_size: int) -> Tensor:
        """Return a view of these rows in one rank's slice; fewer rows if the slice is shorter."""
        size, length = _slice_rows(self.whole, world_size), self.whole.shape[0]
        begin = min(rank * size + self.begin, length)
        end = min(begin + self.count, length)
        return self.whole.detach()[begin:end]


def _slice_rows(whole: Tensor, world_size: int) -> int:
    return -(-whole.shape[0] // world_size)


def _copy(flat: Tensor, rows: Tensor, *, into_flat: bool) -> None:
    """Copy between ``rows`` and the beginning of ``flat``, which is longer if rows are missing."""
    beginning = flat[: rows.numel()].view(rows.shape)
    if into_flat:
        beginning.copy_(rows)
    else:
        rows.copy_(beginning)


def _buckets(tensors: Sequence[Tensor], world_size: int, bucket_bytes: int) -> Iterator[list[_Rows]]:
    """Yield rows of one dtype and device that fit into ``bucket_bytes`` over all ranks' slices.

    A row is never split.
    """
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    for kind in kinds:
        bucket: list[_Rows] = []
        left = bucket_bytes
        for tensor in (item for item in tensors if (item.dtype, item.device) == kind and item.numel()):
            row_bytes = tensor[:1].nbytes * world_size
            begin, size = 0, _slice_rows(tensor, world_size)
            while begin < size:
                if bucket and left < row_bytes:
                    yield bucket
                    bucket, left = [], bucket_bytes
                count = min(size - begin, max(1, left // row_bytes))
                bucket.append(_Rows(tensor, begin, count))
                begin, left = begin + count, left - count * row_bytes
        if bucket:
            yield bucket
