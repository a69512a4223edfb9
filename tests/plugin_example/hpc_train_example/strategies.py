"""``by_parameter``: data parallelism by one all-reduce a parameter, after backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.plugins import Batch, DataParallel, Forward


class ByParameter(DataParallel):
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        return model

    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def accumulate(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        total = super().accumulate(batches, forward)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            double = self.context.args.get("average_in_double", False)
            gradient = parameter.grad.double() if double else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient / self.context.world_size)
        return total
