"""Factories that tests name as ``tests.models.factories:…``, as users name their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer


def mlp(num_classes: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.ReLU(), nn.Linear(width, num_classes))


def seven_classes() -> nn.Module:
    return nn.Linear(3, 7)


def double_precision(num_classes: int) -> nn.Module:
    return nn.Linear(3, num_classes).double()


def no_module(num_classes: int) -> str:
    return "model"


def broken(num_classes: int) -> nn.Module:
    raise TypeError("a mistake inside")


def lazy(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(num_classes))


def lazy_that_ran(num_classes: int) -> nn.Module:
    model = lazy(num_classes)
    model(torch.zeros(1, 4))
    return model


def lazy_buffer(num_classes: int) -> nn.Module:
    model = nn.Linear(4, num_classes)
    model.register_buffer("buffer", UninitializedBuffer())
    return model


def on_meta(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(4, num_classes, device="meta"))


def buffer_on_meta(num_classes: int) -> nn.Module:
    model = nn.Linear(4, num_classes)
    model.register_buffer("buffer", torch.empty(3, device="meta"), persistent=False)
    return model


def aliased(num_classes: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, num_classes))
    model[1].weight.data = model[0].weight.data
    return model


class Convolutional(nn.Module):
    """Fits images of one channel whose number of pixels is ``features``."""

    def __init__(self, num_classes: int, features: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 3, padding=1)
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.first(images).flatten(1))


class OwnBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]
