"""Models of the GPU tests, named in their files as ``tests.gpu.parts:…``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.end_to_end.parts import Net


class Hungry(Net):
    """Takes N bytes of the device's memory per sample, for as long as a forward of training lasts."""

    def __init__(self, num_classes: int, sample_bytes: int) -> None:
        super().__init__(num_classes, norm=False, dropout=0.0)
        self.sample_bytes = sample_bytes

    def forward(self, images_BCHW: Tensor) -> Tensor:
        size = len(images_BCHW) * self.sample_bytes if self.training else 0
        taken = torch.empty(size, dtype=torch.uint8, device=images_BCHW.device)
        out: Tensor = super().forward(images_BCHW)
        del taken
        return out


def hungry(num_classes: int, sample_bytes: int) -> nn.Module:
    return Hungry(num_classes, sample_bytes)
