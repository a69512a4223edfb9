"""mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) of a micro-batch, with the semantics of timm.

Each sample is mixed with the sample at the same place from the end, with one share λ per micro-batch. λ and
the rectangle are drawn from a hash of (seed, step, micro-batch), so that every rank and both ends of a
pipeline compute the same values, for any number of ranks. ``training.forward`` calls it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.random_numbers import hash_words
from hpc_train.training.datasets.types import Batch

#: Distinguishes these random numbers from others of the same micro-batch.
_DRAW = int.from_bytes(b"mixing", "little")


@runtime_checkable
class MixesTargets(Protocol):
    """A task whose loss accepts weighted averages of two samples' targets."""

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return targets (B, …) as float64 that can be averaged, for example one-hot."""


@dataclass(frozen=True)
class Mix:
    """The mixing parameters of one micro-batch."""

    #: λ, the sample's own share.
    own: float
    #: (top, bottom, left, right) of the rectangle of the other image; None: mixup.
    box: tuple[int, int, int, int] | None = None

    def inputs(self, inputs: Tensor) -> Tensor:
        """Return the mixed inputs (B, …) in new memory."""
        other = inputs.flip(0)
        if self.box is None:
            return other.mul_(1 - self.own).add_(inputs, alpha=self.own)
        top, bottom, left, right = self.box
        mixed = inputs.clone()
        mixed[..., top:bottom, left:right] = other[..., top:bottom, left:right]
        return mixed

    def targets(self, soft: Tensor) -> Tensor:
        """Return the mixed targets in new memory; ``soft`` (B, C): shares of the classes."""
        return soft * self.own + soft.flip(0) * (1 - self.own)


@dataclass(frozen=True)
class Mixing:
    """Mixes the micro-batches of a run."""

    seed: int
    task: MixesTargets
    mixup: float
    cutmix: float
    #: If both are enabled: the probability of CutMix for a micro-batch.
    cutmix_probability: float

    @classmethod
    def of(cls, experiment: Experiment, task: object) -> Mixing | None:
        """Return the file's mixing, or None. Raises BadFileError if the task has no soft targets."""
        config = experiment.optimization
        if config.mixup == 0 and config.cutmix == 0:
            return None
        if not isinstance(task, MixesTargets):
            raise BadFileError(
                f"optimization.{'mixup' if config.mixup else 'cutmix'}: task {experiment.task} has no method "
                "soft_targets, which makes targets that can be mixed; write it, or take the key out"
            )
        return cls(experiment.seed, task, config.mixup, config.cutmix, config.cutmix_probability)

    def whole(self, batch: Batch) -> Batch:
        """Return the batch with inputs and targets mixed; it is on the device and prepared for the model."""
        mix = self.draw(batch.step, batch.number, batch.inputs)
        return replace(batch, inputs=mix.inputs(batch.inputs), targets=self._targets(mix, batch))

    def only_targets(self, batch: Batch, inputs: Any) -> Batch:
        """Return the batch with targets mixed as by ``whole``; only the shape of ``inputs`` is read."""
        return replace(batch, targets=self._targets(self.draw(batch.step, batch.number, inputs), batch))

    def _targets(self, mix: Mix, batch: Batch) -> Tensor:
        return mix.targets(self.task.soft_targets(batch.targets))

    def draw(self, step: int, number: int, inputs: Any) -> Mix:
        """Return the mix of a micro-batch with these inputs (B, …). Raises BadFileError for other inputs."""
        word = hash_words(self.seed, step, number, _DRAW)
        # NumPy guarantees that this generator gives the same numbers in all versions.
        random = np.random.RandomState([word & 0xFFFF_FFFF, word >> 32])
        is_cutmix = random.random_sample() < self.cutmix_probability if self.mixup else True
        if not (is_cutmix and self.cutmix):
            _refuse("mixup", inputs, is_possible=isinstance(inputs, Tensor) and inputs.dtype != torch.int64)
            return Mix(float(random.beta(self.mixup, self.mixup)))
        _refuse("cutmix", inputs, is_possible=isinstance(inputs, Tensor) and inputs.dim() == 4)
        return _cut(random, float(random.beta(self.cutmix, self.cutmix)), *inputs.shape[-2:])


def _cut(random: np.random.RandomState, share: float, height: int, width: int) -> Mix:
    """Return a rectangle of about 1 - ``own`` of the image, clipped at the border, and the resulting λ."""
    side = (1 - share) ** 0.5
    rows, columns = int(height * side), int(width * side)
    row, column = random.randint(height), random.randint(width)
    top, bottom = max(row - rows // 2, 0), min(row + (rows + 1) // 2, height)
    left, right = max(column - columns // 2, 0), min(column + (columns + 1) // 2, width)
    return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def _refuse(key: str, inputs: Any, *, is_possible: bool) -> None:
    if is_possible:
        return
    actual = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
    needed = "images (B, C, H, W)" if key == "cutmix" else "images or features in one tensor"
    raise BadFileError(f"optimization.{key}: mixes {needed}, and the inputs are {actual}; take it out")
