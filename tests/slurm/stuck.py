"""A model that trains one step of four micro-batches and then takes minutes: no signal ends it in time."""

from __future__ import annotations

import time

from torch import Tensor, nn

from tests.end_to_end.parts import Net


class Stuck(Net):
    calls = 0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            time.sleep(300)
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int) -> nn.Module:
    return Stuck(num_classes, norm=True, dropout=0.0)
