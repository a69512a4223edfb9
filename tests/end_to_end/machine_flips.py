"""A net in which a bit flips in micro-batches of chosen steps, on one rank or node: a machine that errs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.training.datasets.random_numbers import stream_seed
from tests.end_to_end.parts import Net

#: In the environment: a flip that no replay repeats, ``gradient:10:1`` or ``gradient:10-60:0-3``.
FLIP = "FLIPPED_BIT"
#: The node, or the rank, on which alone bits flip, and a file that the first and only flip creates.
FLIPS_ON, FLIPS_ONCE = "FLIPPED_BIT_ON", "FLIPPED_BIT_ONCE"
SEED = 3


def flipped(value: Tensor) -> Tensor:
    """Return a copy in which a bit of the largest element differs."""
    flat = value.detach().clone().flatten()
    largest = int(flat.abs().argmax())
    flat.view(torch.int32)[largest] ^= 1 << 18
    return flat.view(value.shape)


class Flip(nn.Module):
    """Passes its input on, with its gradient, except in one micro-batch."""

    def __init__(self, flip: str) -> None:
        super().__init__()
        self.kind, steps, numbers = (os.environ.get(FLIP) or flip or ":0:0").split(":")
        self.seeds = {
            stream_seed(SEED, step - 1, number) for step in _span(steps) for number in _span(numbers)
        }

    def is_due(self, kind: str) -> bool:
        """Return True in the micro-batch, whose random stream identifies it."""
        is_its = self.training and self.kind == kind and torch.initial_seed() in self.seeds
        return is_its and _is_here() and _is_first()

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_due("output"):
            hidden = hidden + (flipped(hidden) - hidden.detach())
        if self.is_due("backward"):
            hidden.register_hook(flipped)  # type: ignore[no-untyped-call]
        if self.is_due("rng"):
            torch.rand(1)
        return hidden


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _is_here() -> bool:
    where = os.environ.get(FLIPS_ON)
    return where is None or where in (os.environ.get("SLURMD_NODENAME"), str(dist.get_rank()))


def _is_first() -> bool:
    if file := os.environ.get(FLIPS_ONCE):
        try:
            Path(file).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


class Flipping(Net):
    """The net of the end-to-end tests; its second layer is the flip."""

    def __init__(self, num_classes: int, dropout: float, flip: str) -> None:
        super().__init__(num_classes, norm=True, dropout=dropout)
        self.insert(1, Flip(flip))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        stem, flip, head = self[0], self[1], self[-1]
        assert isinstance(flip, Flip) and isinstance(stem, nn.Conv2d) and isinstance(head, nn.Linear)
        if flip.is_due("weight"):
            with torch.no_grad():
                stem.weight.copy_(flipped(stem.weight))
        if flip.is_due("gradient"):
            handles: list[Any] = []

            def flip_once(gradient: Tensor) -> Tensor:
                handles.pop().remove()
                return flipped(gradient)

            handles.append(head.weight.register_hook(flip_once))  # type: ignore[no-untyped-call]
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int, dropout: float = 0.2, flip: str = "") -> nn.Module:
    return Flipping(num_classes, dropout, flip)
