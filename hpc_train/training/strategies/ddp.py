"""``strategy: ddp``: every rank has the whole model; gradients are averaged in buckets during backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.types import Batch
from hpc_train.training.strategies.base import Forward, RankContext
from hpc_train.training.strategies.buffers import buffers_kept
from hpc_train.training.strategies.data_parallel import DataParallel

#: ``share_buffers`` replaces it, at most once per step. torch 2.15 renames the argument.
_WITHOUT_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)

#: Argument of ``parallel.args``.
FIND_UNUSED = "find_unused_parameters"


class DDPStrategy(DataParallel):
    """torch's DistributedDataParallel, with the same bucket layout in every attempt."""

    #: Used in errors.
    name = "ddp"

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        context.check_args(self.name)
        #: For models that do not use all parameters in every forward; searching the graph takes time.
        self._finds_unused = bool(context.args.get(FIND_UNUSED, False))
        #: With this search DDP keeps its first layout.
        self.is_rehearsed = context.world_size == 1 or self._finds_unused

    @override
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        if self.context.world_size == 1:
            return model
        device = self.context.device
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
            **_WITHOUT_BUFFERS,
        )
        shared_sum = self.context.open_shared_sum()
        if shared_sum is not None:
            wrapped.register_comm_hook(shared_sum, _average)
        return wrapped

    @override
    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        if is_last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    @override
    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        if not self.is_rehearsed:
            # Let DDP build its buckets in the order in which gradients arrive, before the first step. DDP
            # does so after its first backward. With three or more ranks the order of additions depends on
            # the layout, so a resumed run would otherwise not be bitwise identical to an uninterrupted run.
            with buffers_kept(self.model):
                (forward.loss(self.wrapped, batches[0]) * 0).backward()
            if unused := unused_parameters(self.model):  # DDP would wait for their gradients forever
                raise BadFileError(f"model.name: {unused}")
            self.model.zero_grad(set_to_none=True)
            self.is_rehearsed = True
        return super().accumulate(batches, forward)

    def compute_alone(self, batches: Sequence[Batch], forward: Forward) -> None:
        """Run forward and backward of any rank's micro-batches as ``accumulate`` does on that rank.

        Not collective. Gradients and buffers are as before afterwards: there are no gradients.
        """
        with buffers_kept(self.model):
            for batch in batches:
                if batch.weight > 0:
                    with self.synchronised(False):
                        self.forward_backward(batch, forward)
                    self.model.zero_grad(set_to_none=True)


def unused_parameters(model: nn.Module) -> str | None:
    """Return the message on parameters to which backward gave no gradient; None if all have one."""
    named = model.named_parameters()
    unused = [name for name, value in named if value.requires_grad and value.grad is None]
    if not unused:
        return None
    shown = ", ".join(unused[:5]) + (" …" if len(unused) > 5 else "")
    return (
        f"the loss does not use {shown}; "
        "write parallel.args: {find_unused_parameters: true}, or requires_grad_(False) in the model"
    )


def _average(shared_sum, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Average a bucket's gradients in shared memory, sparse gradients (of embeddings) with gloo."""
    gradients = bucket.buffer()
    if gradients.is_sparse:
        gradients = gradients / dist.get_world_size()
        dist.all_reduce(gradients)
    else:
        shared_sum.average(gradients)
    done: Future[Tensor] = Future()
    done.set_result(gradients)
    return done
