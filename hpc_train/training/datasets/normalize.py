# ruff: noqa: N803  (shape suffixes)
"""Converts bytes to normalised floats, on the device. Legend: B images, C channels, H rows, W columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.image_facts import normalize_problem
from hpc_train.training.datasets.types import DataInfo, Tensors, is_structured, map_tensors


class Normalize:
    """Maps uint8 images to (x / 255 - mean) / std. Float images must already be normalised; tokens (int64)
    are returned unchanged.

    ``dtype`` is float64 under fp64, else float32: autocast or the strategy casts further.
    """

    def __init__(
        self,
        info: DataInfo,
        config: DataConfig,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        mean, std = mean_and_std(info, config)
        _check_length("mean", mean, info.channels)
        _check_length("std", std, info.channels)
        # (x / 255 - mean) / std in two operations.
        shape = (1, info.channels, 1, 1)
        self._offset = torch.tensor([255 * value for value in mean], dtype=dtype).view(shape)
        self._scale = torch.tensor([255 * value for value in std], dtype=dtype).view(shape)
        self._dtype = dtype
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, inputs: Tensors) -> Tensors:
        """Return the inputs on their device. In a structure only uint8 (B, C, H, W), which are images, are
        normalised; other integers and bool are unchanged.
        """
        return map_tensors(self._part if is_structured(inputs) else self._images, inputs)

    def _part(self, part: Tensor) -> Tensor:
        if not part.is_floating_point() and not (part.dtype == torch.uint8 and part.dim() == 4):
            return part
        if part.dtype == torch.uint8:
            _check_length("mean", self._offset.flatten().tolist(), part.shape[1])
        return self._images(part)

    def _images(self, images_BCHW: Tensor) -> Tensor:
        """Return (B, C, H, W); tokens and features unchanged."""
        if images_BCHW.dtype == torch.int64:
            return images_BCHW
        if images_BCHW.is_floating_point():
            is_image = images_BCHW.dim() == 4
            layout = self._memory_format if is_image else torch.preserve_format
            return images_BCHW.to(self._dtype, memory_format=layout)
        device = images_BCHW.device
        if self._offset.device != device:
            self._offset, self._scale = self._offset.to(device), self._scale.to(device)
        floats = images_BCHW.to(self._dtype, memory_format=self._memory_format)
        return floats.sub_(self._offset).div_(self._scale)


def mean_and_std(info: DataInfo, config: DataConfig) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation per channel from the file or, by default, from the data set."""
    configured = config.normalize
    assert configured is None or not configured.from_weights, "models.preprocessing writes them out"
    return (info.mean, info.std) if configured is None else (configured.mean, configured.std)


def _check_length(name: str, values: Sequence[float], channels: int) -> None:
    if problem := normalize_problem(name, values, channels):
        raise problem.as_error()
