"""A model whose second forward pass raises on every rank."""

from __future__ import annotations

from torch import Tensor, nn

from tests.end_to_end.parts import Net


class Crashing(Net):
    calls = 0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 3:
            raise ValueError("on purpose")
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int) -> nn.Module:
    return Crashing(num_classes, norm=True, dropout=0.0)
