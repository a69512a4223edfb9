"""A model with which rank 1 aborts in its second step as NCCL does at a device error, the others over it."""

from __future__ import annotations

import os

from torch import Tensor, nn

from tests import aborts
from tests.end_to_end.parts import Net


class Aborting(Net):
    calls = 0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            aborts.abort_as(aborts.DEVICE if os.environ["SLURM_PROCID"] == "1" else aborts.PEER)
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int) -> nn.Module:
    return Aborting(num_classes, norm=True, dropout=0.0)
