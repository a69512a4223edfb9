"""What a data set tells the model and the task, and a batch as both see it.

Lies in ``runtime`` because data sets, models, tasks and strategies all speak it and import nothing of
each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DataInfo:
    """Facts of a data set that reach the model, the task and the device-side normalisation."""

    #: Of sequences: the size of the vocabulary.
    num_classes: int
    #: Of sequences: 0, and neither ``mean`` nor ``std``.
    channels: int
    #: A value a channel, of images scaled to 0…1.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    #: Tokens of a sample; None: samples are images.
    sequence_length: int | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch, of training or evaluation.

    ``inputs`` (B, …) and ``targets`` (B, …) are CPU tensors as the loader makes them (images uint8, not
    normalised; tokens int64) or, after ``to``, on the device. ``number`` is its place i of 0…M−1 in the step
    (or in the evaluation). ``weight`` is 1/M, or 0 for a spare slot. ``valid`` (B,) bool is false where a
    sample only fills up.
    """

    step: int
    number: int
    weight: float
    inputs: Tensor
    targets: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; the copy does not wait where the memory is pinned."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            valid=self.valid.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; called by the loader."""
        return replace(
            self,
            inputs=self.inputs.pin_memory(),
            targets=self.targets.pin_memory(),
            valid=self.valid.pin_memory(),
        )
