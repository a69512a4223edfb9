"""Models of the GPU tests, named in their files as ``tests.gpu.parts:…``."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.end_to_end.parts import Net
from tests.waiting import HANG_LIMIT_S, came_true


class Hungry(Net):
    """Takes N bytes of the device's memory per sample, for as long as a forward of training lasts."""

    def __init__(self, num_classes: int, sample_bytes: int, dropout: float, pause_s: float) -> None:
        super().__init__(num_classes, norm=False, dropout=dropout, pause_s=pause_s)
        self.sample_bytes = sample_bytes

    def forward(self, images_BCHW: Tensor) -> Tensor:
        size = len(images_BCHW) * self.sample_bytes if self.training else 0
        taken = torch.empty(size, dtype=torch.uint8, device=images_BCHW.device)
        out: Tensor = super().forward(images_BCHW)
        del taken
        return out


def hungry(num_classes: int, sample_bytes: int, dropout: float = 0.0, pause_s: float = 0.0) -> nn.Module:
    return Hungry(num_classes, sample_bytes, dropout, pause_s)


class Counted(Hungry):
    """Waits, in each forward but the first, for the child process that counts the FLOPs of the first.

    ``nan_at``: the forward of this process, from 1, whose outputs are NaN; 0: none.
    """

    num_forwards = 0

    def __init__(self, num_classes: int, nan_at: int) -> None:
        super().__init__(num_classes, sample_bytes=1 << 20, dropout=0.0, pause_s=0.0)
        self.nan_at = nan_at

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if images_BCHW.device.type == "meta":
            return super().forward(images_BCHW)
        if Counted.num_forwards > 0:
            assert came_true(lambda: not multiprocessing.active_children(), HANG_LIMIT_S)
        Counted.num_forwards += 1
        out = super().forward(images_BCHW)
        return out * math.nan if Counted.num_forwards == self.nan_at else out


def counted(num_classes: int, nan_at: int = 0) -> nn.Module:
    return Counted(num_classes, nan_at)


class OutOfRange(Net):
    """Causes a device error in the third forward: an index that the device, or its stand-in, refuses."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, norm=False, dropout=0.0)
        self.forwards = 0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 3 and (fails := os.environ.get("FAKE_CUDA_FAILS")):
            Path(fails).touch()
        elif self.forwards == 3:
            four = torch.zeros(4, device=images_BCHW.device)
            images_BCHW = images_BCHW + four[torch.full((1,), 9, device=four.device)]
        out: Tensor = super().forward(images_BCHW)
        return out


def out_of_range(num_classes: int) -> nn.Module:
    return OutOfRange(num_classes)


class NeverDone(Net):
    """Occupies the device for hours in the third forward; the host of the stand-in, which has no queue."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, norm=False, dropout=0.0)
        self.forwards = 0

    @torch.compiler.disable
    def occupy(self) -> None:
        self.forwards += 1
        if self.forwards == 3 and "fake-cuda" in os.environ.get("LD_PRELOAD", ""):
            time.sleep(10**5)
        elif self.forwards == 3:
            for _ in range(100):
                torch.cuda._sleep(10**12)  # about nine minutes each

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.occupy()
        out: Tensor = super().forward(images_BCHW)
        return out


def never_done(num_classes: int) -> nn.Module:
    return NeverDone(num_classes)


def not_deterministic(num_classes: int) -> nn.Module:
    """The backward of adaptive pooling adds with atomics."""
    pool = nn.AdaptiveAvgPool2d((3, 5))
    return nn.Sequential(nn.Conv2d(1, 8, 3), pool, nn.Flatten(), nn.Linear(120, num_classes))
