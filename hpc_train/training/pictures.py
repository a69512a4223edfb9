# ruff: noqa: N803, N806  (shape suffixes)
"""Validation images with the predictions drawn on them: one sheet per evaluation (``evaluation.images``).

The samples are the same in every evaluation and on any number of ranks: the first, and others evenly spaced
over the validation data. The rank that has a sample's outputs calls the task to draw it, and rank 0 receives
the few finished pictures; no other image leaves a rank.

Legend: K chosen samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.normalize import mean_and_std
from hpc_train.datasets.structures import Tensors, is_structured, tensors_of
from hpc_train.datasets.types import Batch
from hpc_train.tasks import drawing
from hpc_train.tasks.base import DrawsPictures, Task

_log = logging.getLogger(__name__)

FILE = "predictions.png"
#: How far float images may exceed black and white after their normalization is undone (assumed).
_TOLERANCE = 0.05


@dataclass
class Pictures:
    """Draws the chosen samples of one run's evaluations."""

    task: DrawsPictures
    #: Indices in the validation data, ascending.
    chosen: tuple[int, ...]
    #: Mean and standard deviation (``std``) per channel with which float images were normalized.
    mean: Sequence[float]
    std: Sequence[float]
    #: Group of all ranks, for tensors on the CPU; None: the default group.
    group: dist.ProcessGroup | None = None
    #: Prefix of the metrics' names → place in ``chosen`` → this rank's pictures.
    _drawn: dict[str, dict[int, Image.Image]] = field(default_factory=dict)
    _has_failed: bool = False

    @classmethod
    def of(
        cls, experiment: Experiment, source: DataSource, task: Task, group: dist.ProcessGroup | None = None
    ) -> Pictures | None:
        """Return the run's pictures; None if the file disables them or task or data have no images."""
        count = experiment.evaluation.images
        if not isinstance(task, DrawsPictures) or source.info.sequence_length is not None:
            return None
        if count == 0 or source.val is None:
            return None
        mean, std = mean_and_std(source.info, experiment.data)
        return cls(task, evenly_spaced(len(source.val), count), mean, std, group)

    def begin(self, prefix: str) -> None:
        """Drop the pictures under this prefix: an evaluation begins, perhaps again."""
        self._drawn[prefix] = {}

    def add(self, prefix: str, outputs: Any, moved: Batch, batch: Batch) -> None:
        """Draw the chosen samples of a batch. ``moved``: the batch on the device, its images normalized.

        If the task raises, this rank draws nothing more, with a warning: pictures never end training.
        """
        size = len(batch.valid)
        first = batch.number * size
        for number, index in enumerate(self.chosen):
            place = index - first
            if self._has_failed or not 0 <= place < size or not batch.valid[place]:
                continue
            try:
                picture = self._picture(outputs, moved, batch.inputs, place)
            except Exception:
                self._has_failed = True
                _log.warning("predictions can't be drawn; training continues without", exc_info=True)
                continue
            if picture is not None:
                self._drawn[prefix][number] = picture

    def _picture(self, outputs: Any, moved: Batch, inputs: Tensors, place: int) -> Image.Image | None:
        images = next(_images_in(inputs), None)
        if images is None:
            return None
        image = Image.fromarray(rgb(images[place], self.mean, self.std))
        picture = self.task.picture(outputs, moved, place, image)
        return None if picture is None else picture.convert("RGB")

    def files(self) -> dict[str, bytes]:
        """Return, on rank 0, the sheet of each prefix that has pictures. Collective."""
        found = {}
        for prefix, drawn in self._drawn.items():
            pictures = on_rank_0(drawn, len(self.chosen), self.group)
            titled = [(f"sample {self.chosen[number]}", picture) for number, picture in pictures.items()]
            if titled:
                found[f"{prefix}{FILE}"] = png(drawing.sheet(titled))
        self._drawn = {}
        return found


def evenly_spaced(length: int, count: int) -> tuple[int, ...]:
    """Return up to ``count`` evenly spaced indices below ``length``, starting at 0."""
    count = min(count, length)
    return tuple(number * length // count for number in range(count))


def png(image: Image.Image) -> bytes:
    """Return the image as a PNG file, always identical for the same pixels."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def on_rank_0(
    drawn: dict[int, Image.Image], count: int, group: dist.ProcessGroup | None = None
) -> dict[int, Image.Image]:
    """Return on rank 0 the pictures of all ranks, numbered below ``count``, in order. Collective.

    Each picture is on one rank at most. The others add zeros, so that two reductions gather all pictures.
    """
    sizes_K2 = torch.zeros(count, 2, dtype=torch.int64)
    for number, picture in drawn.items():
        sizes_K2[number] = torch.tensor(picture.size)
    dist.all_reduce(sizes_K2, group=group)
    lengths = (3 * sizes_K2.prod(dim=1)).tolist()
    pixels = torch.zeros(sum(lengths), dtype=torch.uint8)
    parts = pixels.split(lengths)
    for number, picture in drawn.items():
        parts[number].copy_(torch.from_numpy(np.array(picture).reshape(-1)))
    if len(pixels) > 0:
        dist.all_reduce(pixels, group=group)  # along the ring: a reduce would connect rank 0 with every rank
    if dist.get_rank() != 0:
        return {}
    return {
        number: Image.fromarray(part.view(height, width, 3).numpy())
        for number, (part, (width, height)) in enumerate(zip(parts, sizes_K2.tolist(), strict=True))
        if len(part) > 0
    }


def rgb(image_CHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return an image of a loader's batch as (H, W, 3) uint8.

    The normalization of float images is undone; they are rescaled from black to white if they exceed that
    range. Images with one or two channels are gray; of more than three channels the first three are shown.
    """
    channels = len(image_CHW)
    values_CHW = image_CHW.cpu()
    if values_CHW.dtype != torch.uint8:
        values_CHW = values_CHW.double().nan_to_num(0.0, 0.0, 0.0)
        if image_CHW.is_floating_point() and len(mean) == len(std) == channels:
            scale, offset = (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in (std, mean))
            values_CHW = values_CHW * scale + offset
        values_CHW = _as_bytes(values_CHW)
    shown_CHW = values_CHW[:3] if channels >= 3 else values_CHW[:1].expand(3, -1, -1)
    return shown_CHW.permute(1, 2, 0).contiguous().numpy()


def _as_bytes(values: Tensor) -> Tensor:
    low, high = float(values.min()), float(values.max())
    if low < -_TOLERANCE or high > 1 + _TOLERANCE:
        values = (values - low) / max(high - low, 1e-12)
    return (255 * values.clamp(0, 1)).round().to(torch.uint8)


def _images_in(inputs: Tensors) -> Iterator[Tensor]:
    """Yield the images (B, C, H, W) of a batch; in a structure only bytes, as in ``Normalize``."""
    for part in tensors_of(inputs):
        is_image = part.dim() == 4 and part.dtype != torch.int64 and part[:1].numel() > 0
        if is_image and (part.dtype == torch.uint8 or not is_structured(inputs)):
            yield part
