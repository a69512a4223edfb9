# ruff: noqa: N803, N806  (shape suffixes)
"""Targets: of one sample as a tensor, of several as a batch, and whether they are what the task needs.

Called by ``reading``, on the ranks and in ``hpc-train prepare`` alike.

Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.runtime.data_info import TargetSpec

_FIX_DATA = "fix the data set, or name a task that takes such targets"
_FIX_VALUE = "fix the target, or the data set's num_classes"


class MisfitError(Exception):
    """The target at ``place`` of a batch is not what the task needs; the message is for ``of_sample``."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place

    def of_sample(self, title: str) -> BadFileError:
        """Return the user's error; ``title`` names the sample."""
        return BadFileError(f"data: {title} has the target {self}")


@dataclass(frozen=True)
class TargetCheck:
    """Checks targets for the task that the file names. Without ``spec`` any numbers will do."""

    task: str
    spec: TargetSpec | None = None

    def batch(self, targets_B: Tensor) -> Tensor:
        """Return (B, …) targets as the task reads them. Raises MisfitError for the first misfit."""
        spec = self.spec
        if spec is None:
            return targets_B
        if not (_has_kind(targets_B, spec) and _has_shape(targets_B, spec)):
            raise self._misfit(0, _in_words(targets_B[0]), _FIX_DATA)
        converted_B = targets_B.to(torch.int64) if spec.kind == "integer" else targets_B
        wrong_B = _out_of_bounds(converted_B, spec)
        if wrong_B.any():
            place = int(wrong_B.to(torch.int8).argmax())
            raise self._misfit(place, _in_words(targets_B[place]), _FIX_VALUE)
        return converted_B

    def one(self, target: Any) -> Tensor:
        """Return one sample's target as the task reads it. Raises MisfitError where it does not fit."""
        try:
            tensor = as_target(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._misfit(0, f"{target!r:.60} ({type(target).__name__})", _FIX_DATA) from error
        return self.batch(tensor[None])[0]

    def _misfit(self, place: int, found: str, remedy: str) -> MisfitError:
        if self.spec is None:
            return MisfitError(place, f"{found}; return a number, a tensor, an array or a PIL image")
        return MisfitError(place, f"{found}, and task {self.task} needs {self.spec}; {remedy}")


def as_target(target: Any) -> Tensor:
    """Return a target as a tensor that keeps its dtype and shape.

    A Python int becomes int64, a bool bool, a float torch's default dtype (float32); lists of them alike.
    Raises TypeError, ValueError or RuntimeError for what is not made of numbers.
    """
    if isinstance(target, Tensor):
        return target
    if isinstance(target, (np.ndarray, np.generic, Image.Image)):
        return torch.from_numpy(np.array(target))  # a copy: torch refuses read-only and flipped arrays
    return torch.tensor(target)


def stack_targets(targets: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """Return (B, …). Raises BadFileError, naming two samples, where dtypes or shapes differ."""
    first = targets[0]
    for index, target in zip(indices, targets, strict=True):
        if (target.dtype, target.shape) != (first.dtype, first.shape):
            raise BadFileError(
                f"data: sample {indices[0]} has the target {_in_words(first)}, and sample {index} "
                f"{_in_words(target)}; return targets of one dtype and shape"
            )
    return torch.stack(list(targets))


def refuse_moved_masks(images: Sequence[Tensor] | Tensor, targets_B: Tensor, key: str | None) -> None:
    """Raise BadFileError where ``key`` flips, crops or resizes images but not their masks."""
    sides = images[0].shape[-2:]
    if key is not None and targets_B.dim() > 2 and targets_B.shape[-2:] == sides:
        raise BadFileError(
            f"{key}: moves the pixels of the image, but not those of its {sides[0]}x{sides[1]} target; "
            "take it out, and change image and target alike in the data set"
        )


def _has_kind(targets: Tensor, spec: TargetSpec) -> bool:
    if spec.kind == "float":
        return targets.is_floating_point()
    return spec.kind == "any" or not (targets.is_floating_point() or targets.is_complex())


def _has_shape(targets_B: Tensor, spec: TargetSpec) -> bool:
    if spec.shape is None:
        return True
    found = targets_B.shape[1:]
    return len(found) == len(spec.shape) and all(
        wanted in (None, size) for size, wanted in zip(found, spec.shape, strict=True)
    )


def _out_of_bounds(targets_B: Tensor, spec: TargetSpec) -> Tensor:
    """Return for each sample, (B,) bool, whether a value is out of the bounds; NaN always is."""
    fits = torch.ones_like(targets_B, dtype=torch.bool)
    if spec.minimum is not None:
        fits &= targets_B >= spec.minimum
    if spec.maximum is not None:
        fits &= targets_B <= spec.maximum
    return ~fits.reshape(len(targets_B), -1).all(dim=1)


def _in_words(target: Tensor) -> str:
    dtype, shape = str(target.dtype).removeprefix("torch."), tuple(target.shape)
    if target.dim() == 0:
        return f"{target.item()} ({dtype} of shape ())"
    if target.numel() == 0 or target.is_complex():
        return f"of {dtype}, shape {shape}"
    return f"of {dtype}, shape {shape}, values {target.min().item()} to {target.max().item()}"
