"""``strategy: zero1``: as ddp, but each rank owns the optimizer state of its own slice of each parameter.

Legend: R ranks; a slice is what ``Shard(0)`` of a DTensor gives a rank (``strategies.gathering``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpc_train.datasets.types import Batch
from hpc_train.strategies.base import Forward
from hpc_train.strategies.ddp import DDPStrategy
from hpc_train.strategies.gathering import gather_slices, own_slice


class ZeRO1Strategy(DDPStrategy):
    """ZeRO stage 1 (Rajbhandari et al. 2019, arXiv:1910.02054): only the optimizer's state is sharded.

    What is optimised are DTensors whose local part is a view of the model's own parameter, so a slice that
    the optimizer changes needs no copy on this rank, only on the others.
    """

    name = "zero1"

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        wrapped = super().wrap(model, blocks)
        self._whole = super().optimized()
        self._slices = self._whole
        if self.context.world_size > 1:
            mesh = init_device_mesh(
                self.context.device.type, (self.context.world_size,), mesh_dim_names=("shard",)
            )
            self._slices = {name: nn.Parameter(_sliced(value, mesh)) for name, value in self._whole.items()}
        return wrapped

    def optimized(self) -> dict[str, nn.Parameter]:
        return dict(self._slices)

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        # The optimizer drops the gradients of the slices alone.
        for parameter in self._whole.values():
            parameter.grad = None
        total = super().accumulate(batches, forward)
        for whole, part in self._pairs():
            part.grad = None if whole.grad is None else _sliced(whole.grad, part.device_mesh)
        return total

    def weights_changed(self) -> None:
        sharded = [whole for whole, part in self._pairs() if part.placements == (Shard(0),)]
        if sharded:
            gather_slices(sharded, self.context.rank, self.context.world_size)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the slices: the whole gradients are as fp16's scaler left them, and nobody reads them."""
        parameters = [part for part in self._slices.values() if part.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _pairs(self) -> Iterator[tuple[nn.Parameter, DTensor]]:
        """Yield each parameter with its slice; none where one rank alone trains."""
        for name, part in self._slices.items():
            if isinstance(part, DTensor):
                yield self._whole[name], part


@torch.no_grad()
def _sliced(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor over a view of this rank's slice, or of all where no slice is contiguous."""
    placement: Placement = Shard(0) if _has_rows(whole) else Replicate()
    is_sharded = placement.is_shard()
    local = own_slice(whole, mesh.get_local_rank(), mesh.size()) if is_sharded else whole.detach()
    return DTensor.from_local(
        local, mesh, (placement,), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _has_rows(whole: Tensor) -> bool:
    """Tell whether dim 0 is outermost in memory: fused kernels walk it, and transposed rows have gaps."""
    return whole.dim() > 0 and whole.stride(0) * whole.shape[0] >= whole.numel()
