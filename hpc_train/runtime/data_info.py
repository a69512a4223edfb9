"""What a data set tells the model and the task, what a task needs of the data, and a batch as both see it.

Lies in ``runtime`` because data sets, models, tasks and strategies all speak it and import nothing of
each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
class TargetSpec:
    """What a task needs as the target of one sample; loaders and ``prepare`` refuse anything else."""

    #: In words, with the article: ``a class number``.
    description: str
    #: ``integer``: any integer dtype or bool, converted to int64. ``float``: any floating-point dtype, kept.
    kind: Literal["integer", "float", "any"] = "any"
    #: Of one sample, without the batch. None in place of a size: any size; None for all: any shape.
    shape: tuple[int | None, ...] | None = None
    #: The smallest and the largest value, inclusive; None: no bound.
    minimum: float | None = None
    maximum: float | None = None

    def __str__(self) -> str:
        kind = {"integer": "integers", "float": "floating-point numbers", "any": "numbers"}[self.kind]
        shape = "any shape" if self.shape is None else f"shape {_in_words(self.shape)}"
        low = "" if self.minimum is None else f", at least {self.minimum:g}"
        high = "" if self.maximum is None else f", at most {self.maximum:g}"
        return f"{self.description} ({kind} of {shape}{low}{high})"


def _in_words(shape: tuple[int | None, ...]) -> str:
    """Return ``(3, any)`` as tuples are written."""
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


@dataclass(frozen=True)
class Batch:
    """One micro-batch, of training or evaluation.

    ``inputs`` (B, …) and ``targets`` (B, …) are CPU tensors as the loader makes them (images uint8, not
    normalised; tokens int64; targets in the dtype and shape that the data set gives them, or that the task's
    ``TargetSpec`` names) or, after ``to``, on the device. ``number`` is its place i of 0…M−1 in the step
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
