"""Models and a transform of the end-to-end tests, named in their files as ``tests.end_to_end.parts:…``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sources import digits

#: The digit that ``Poisoned`` can't bear.
POISON = 1000


class Block(nn.Module):
    """Convolution, BatchNorm, dropout: everything that a resume can get wrong."""

    def __init__(self, channels: int, *, norm: bool, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.relu(self.norm(self.conv(images_BCHW))))
        return images_BCHW + hidden


class Net(nn.Sequential):
    """A stem, two blocks and a head, for 1×32×32 digits."""

    def __init__(self, num_classes: int, *, norm: bool, dropout: float, pause_s: float = 0.0) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 4, stride=4),
            nn.Sequential(*(Block(8, norm=norm, dropout=dropout) for _ in range(2))),
            nn.Flatten(),
            nn.Linear(8 * 8 * 8, num_classes),
        )
        self.pause_s = pause_s

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause_s)  # a step long enough to be killed in
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int, norm: bool = True, dropout: float = 0.2, pause_s: float = 0.0) -> nn.Module:
    return Net(num_classes, norm=norm, dropout=dropout, pause_s=pause_s)


class Segmenter(nn.Module):
    """Logits (B, C, H, W) as torchvision's models return them, with an auxiliary head in training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Tanh())
        self.head, self.aux_head = nn.Conv2d(8, num_classes, 1), nn.Conv2d(8, num_classes, 1)

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        hidden = self.stem(images_BCHW)
        if not self.training:
            return {"out": self.head(self.body(hidden))}
        return {"out": self.head(self.body(hidden)), "aux": self.aux_head(hidden)}


def segmenter(num_classes: int) -> nn.Module:
    return Segmenter(num_classes)


def failing(num_classes: int, rank: int) -> nn.Module:
    """A model whose forward raises on one rank, at the third step."""
    return Failing(num_classes, rank)


class Failing(nn.Module):
    def __init__(self, num_classes: int, rank: int) -> None:
        super().__init__()
        self.net = net(num_classes)
        self.rank = rank
        self.calls = 0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and torch.distributed.get_rank() == self.rank:
            raise ValueError("this rank was told to fail")
        out: Tensor = self.net(images_BCHW)
        return out


class Recording(nn.Module):
    """Notes the dtype that its first convolution yields in training, not while its FLOPs are counted."""

    def __init__(self, num_classes: int, path: str) -> None:
        super().__init__()
        self.net = Net(num_classes, norm=False, dropout=0.0)
        self.path = path

    def forward(self, images_BCHW: Tensor) -> Tensor:
        hidden: Tensor = self.net[0](images_BCHW)
        if self.training and not hidden.is_meta:
            with open(self.path, "a") as file:  # noqa: PTH123
                file.write(f"{hidden.dtype}\n")
        for layer in list(self.net)[1:]:
            hidden = layer(hidden)
        return hidden


def recording(num_classes: int, path: str) -> nn.Module:
    return Recording(num_classes, path)


class Poisoned(Net):
    """A net that makes NaN of a micro-batch that contains one certain digit; without augmentation."""

    def __init__(self, num_classes: int, pause_s: float, factor: float = torch.nan) -> None:
        super().__init__(num_classes, norm=True, dropout=0.2, pause_s=pause_s)
        self.factor = factor
        source = digits.build("", DataConfig(name="digits"), download=False)
        image, _ = source.train.batch(torch.tensor([POISON]))  # type: ignore[attr-defined]
        normalize = Normalize(source.info, DataConfig(name="digits"))
        self.register_buffer("poison", normalize(image), persistent=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        poison_1CHW = self.get_buffer("poison")
        if self.training and bool((images_BCHW == poison_1CHW).flatten(1).all(1).any()):
            images_BCHW = images_BCHW * self.factor  # reaches BatchNorm's statistics, too
        out: Tensor = super().forward(images_BCHW)
        return out


def poisoned(num_classes: int, pause_s: float = 0.0, factor: float = torch.nan) -> nn.Module:
    return Poisoned(num_classes, pause_s, factor)


class Waiting(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Digits, one of which nobody can read as long as a file is there; another file tells who tries."""

    classes = tuple("0123456789")

    def __init__(self, split: TensorSplit, held: int | None, path: str) -> None:
        self._images, self._classes = split.batch(torch.arange(len(split)))
        self._held, self._path = held, Path(path)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        while index == self._held and self._path.exists():
            self._path.with_suffix(".tried").touch()
            time.sleep(0.05)
        return self._images[index], int(self._classes[index])


def waiting(held: int, path: str, in_evaluation: bool = False) -> tuple[Waiting, Waiting]:
    source = digits.build("", DataConfig(name="digits"), download=False)
    train, val = source.train, source.val
    assert isinstance(train, TensorSplit) and isinstance(val, TensorSplit)
    return (
        Waiting(train, None if in_evaluation else held, path),
        Waiting(val, held if in_evaluation else None, path),
    )


def slow_build(num_classes: int, seconds: float) -> nn.Module:
    time.sleep(seconds)
    return net(num_classes)


class SlowOnce(Net):
    """A net whose first forward takes as long as a compilation."""

    def __init__(self, num_classes: int, seconds: float) -> None:
        super().__init__(num_classes, norm=True, dropout=0.2)
        self.seconds = seconds

    def forward(self, images_BCHW: Tensor) -> Tensor:
        seconds, self.seconds = self.seconds, 0.0
        time.sleep(seconds)
        out: Tensor = super().forward(images_BCHW)
        return out


def slow_once(num_classes: int, seconds: float) -> nn.Module:
    return SlowOnce(num_classes, seconds)


class Layered(Net):
    """A net that says its blocks: they are too small to be found."""

    def blocks(self) -> list[nn.Module]:
        return list(self[1].children())


def layered(num_classes: int, pause_s: float = 0.0) -> nn.Module:
    return Layered(num_classes, norm=True, dropout=0.2, pause_s=pause_s)


def noise() -> Callable[[Image.Image], np.ndarray[Any, Any]]:
    """Return a transform that adds one number of each generator to a PIL image, and returns an array."""

    def transform(image: Image.Image) -> np.ndarray[Any, Any]:
        assert isinstance(image, Image.Image)
        added = 1 + random.randrange(20) + np.random.randint(20) + torch.randint(20, ()).item()
        changed: np.ndarray[Any, Any] = np.asarray(image) // 2 + added
        return changed.astype(np.uint8)

    return transform
