"""The protocol of a data set plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.config.training_sections import DataConfig
from hpc_train.runtime.data_info import DataInfo

#: What a split may give as an image: PIL, uint8 (C, H, W), or float (C, H, W) that is normalised already; or
#: a row of features, float (F,).
RawImage = Image.Image | Tensor | np.ndarray[Any, Any]


#: A number, or an array of one shape for all samples. Dtype and shape reach the task as they are.
RawTarget = Tensor | np.ndarray[Any, Any] | np.generic | Image.Image | int | float | Sequence[Any]


class Split(Protocol):
    """One part of a data set: sample i is always the same (image, target), or (tokens, those that follow)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[RawImage, RawTarget]: ...


@runtime_checkable
class ArraySplit(Protocol):
    """A split that is read as whole batches, several times faster than sample by sample.

    It needs no ``__getitem__``. Sequences are read only this way.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (B, …) and targets (B, …) of ``indices`` (B,) int64.

        Inputs are images (B, C, H, W) uint8 or float, rows of features (B, F) float, or tokens (B, T) int64.
        Targets have the dtype and shape that the task needs.
        """


AnySplit = Split | ArraySplit


@dataclass(frozen=True)
class TensorSplit:
    """Images in memory, (N, C, H, W) uint8, and their targets, (N, …) of any dtype."""

    images: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8 and self.images.dim() == 4
        assert self.targets.shape[:1] == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[RawImage, RawTarget]:
        return self.images[index], self.targets[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.targets[indices]


@dataclass(frozen=True)
class DataSource:
    """What a data set plug-in returns. Without ``val`` the run is not evaluated."""

    train: AnySplit
    val: AnySplit | None
    info: DataInfo


class DatasetBuilder(Protocol):
    """The plug-in itself: a function. ``rest`` is what the name says after ``provider/``.

    ``download`` is true in ``hpc-train prepare`` alone: only then may it use the network. Raises
    BadFileError, beginning with a key path (``data.root: …; …``), where the file asks for what is not there.
    """

    def __call__(self, rest: str, config: DataConfig, *, download: bool) -> DataSource: ...
