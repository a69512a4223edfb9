"""The protocol of a data set plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.config.training_sections import DataConfig
from hpc_train.runtime.data_info import DataInfo

#: What a split may give as an image: PIL, uint8 (C, H, W), or float (C, H, W) that is normalised already.
RawImage = Image.Image | Tensor | np.ndarray[Any, Any]


class Split(Protocol):
    """One part of a data set: sample i is always the same (image, class), or (tokens, those that follow)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[RawImage, int | Tensor]: ...


@runtime_checkable
class ArraySplit(Protocol):
    """A split that lies in memory: read as whole batches, several times faster than one by one.

    Sequences are read so only.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[RawImage, int | Tensor]: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8 and classes (B,) int64 of ``indices`` (B,) int64.

        Of sequences: inputs and targets (B, T) int64.
        """


@dataclass(frozen=True)
class TensorSplit:
    """Images in memory, (N, C, H, W) uint8, and their classes, (N,) int64."""

    images: Tensor
    classes: Tensor

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8 and self.images.dim() == 4
        assert self.classes.shape == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[RawImage, int]:
        return self.images[index], int(self.classes[index])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.classes[indices]


@dataclass(frozen=True)
class DataSource:
    """What a data set plug-in returns. Without ``val`` the run is not evaluated."""

    train: Split
    val: Split | None
    info: DataInfo


class DatasetBuilder(Protocol):
    """The plug-in itself: a function. ``rest`` is what the name says after ``provider/``.

    ``download`` is true in ``hpc-train prepare`` alone: only then may it use the network. Raises
    BadFileError, beginning with a key path (``data.root: …; …``), where the file asks for what is not there.
    """

    def __call__(self, rest: str, config: DataConfig, *, download: bool) -> DataSource: ...
