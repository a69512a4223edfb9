# ruff: noqa: N803, N806  (shape suffixes)
"""Targets: one sample's target as a tensor, several as a batch, and a check that they fit the task.

Called by ``reading``, on the ranks and in ``hpc-train prepare`` alike.

Legend: B samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.types import (
    TargetSpec,
    TargetSpecs,
    Tensors,
    collate,
    is_structured,
    map_tensors,
    tensors_of,
)

_FIX_DATA = "fix the data set, or name a task that takes such targets"
_FIX_CLASS, _FIX_VALUE = "fix the target, or the data set's num_classes", "fix the target"
#: Of the sum of a target's numbers: float16 and bfloat16 round them.
_SUM_TOLERANCE = 0.01


class MisfitError(Exception):
    """The target at index ``place`` of a batch does not fit the task; the message is for ``of_sample``."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place

    def of_sample(self, title: str) -> BadFileError:
        """Return the user error; ``title`` names the sample."""
        return BadFileError(f"data: {title} has the target {self}")


@dataclass(frozen=True)
class TargetCheck:
    """Checks targets for the experiment's task. Without ``spec`` any numbers are accepted."""

    task: str
    spec: TargetSpecs = None

    def batch(self, targets: Tensors) -> Tensors:
        """Return the targets of a batch for the task. Raises MisfitError for the first misfit."""
        return self._each_part(targets, self._whole)

    def accepts(self, targets: Tensor) -> bool:
        """Return True if ``batch`` would return any of these targets unchanged."""
        try:
            return self.batch(targets) is targets
        except MisfitError:
            return False

    def one(self, target: Any) -> Tensors:
        """Return one sample's target for the task. Raises MisfitError if it does not fit."""
        try:
            tensors = as_targets(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._misfit(0, f"{target!r:.60} ({type(target).__name__})", _FIX_DATA) from error
        return self._each_part(tensors, lambda part, *spec: self._fitting(part[None], *spec)[0])

    def stacked(self, targets: Sequence[Tensors], indices: Sequence[int]) -> Tensors:
        """Return the targets of several samples as those of a batch.

        Raises BadFileError, naming two samples, if dtypes or shapes differ that must be equal.
        """

        def stack(parts: Sequence[Tensor], name: str) -> Tensors:
            spec = self.spec.get(name) if isinstance(self.spec, dict) else self.spec
            # Masks are stacked after they have been moved to one size.
            is_list = spec is not None and (spec.is_ragged or spec.geometry == "mask")
            return list(parts) if is_list else _stack(parts, indices, name)

        return collate(targets, stack)

    def refuse_other_sides(self, targets: Tensors, sides: Sequence[int]) -> None:
        """Raise MisfitError if a mask of one sample differs in size from its image, (H, W)."""
        for name, mask in parts_moved_as("mask", self.spec, targets):
            if tuple(mask.shape[-2:]) != tuple(sides):
                mask_size = f"{_named(name)}of {mask.shape[-2]}x{mask.shape[-1]} pixels"
                is_turned = tuple(mask.shape[-2:]) == tuple(reversed(sides))
                remedy = (
                    "if the image has an EXIF orientation, write data.exif_orientation: apply"
                    if is_turned
                    else "make both the same size"
                )
                raise MisfitError(0, f"{mask_size}, and its image has {sides[0]}x{sides[1]}; {remedy}")

    def _each_part(self, targets: Tensors, check: Callable[[Any, TargetSpec, str], Any]) -> Tensors:
        """Return ``targets`` with ``check`` applied to each part that has a spec."""
        if self.spec is None:
            return targets
        if isinstance(self.spec, TargetSpec):
            if is_structured(targets):
                raise self._misfit(0, _structure_text(targets), _FIX_DATA)
            return check(targets, self.spec, "")
        if not (isinstance(targets, dict) and self.spec.keys() <= targets.keys()):
            raise self._misfit(0, _structure_text(targets), _FIX_DATA)
        return targets | {name: check(targets[name], spec, name) for name, spec in self.spec.items()}

    def _whole(self, targets: Tensors, spec: TargetSpec, name: str) -> Tensors:
        """Return a batch's targets, (B, …) or a list of B."""
        if is_structured(targets) or (isinstance(targets, list) and not spec.is_ragged):
            raise self._misfit(0, f"{_named(name)}{_structure_text(targets)}", _FIX_DATA, spec)
        if not spec.is_ragged:
            return self._fitting(targets, spec, name)
        return [
            self._fitting(target[None], spec, name, place)[0] for place, target in enumerate(list(targets))
        ]

    def _fitting(self, targets_B: Tensor, spec: TargetSpec, name: str, first: int = 0) -> Tensor:
        """Return (B, …) targets of the samples from place ``first`` on."""
        if not (_has_kind(targets_B, spec) and _has_shape(targets_B, spec)):
            raise self._misfit(first, f"{_named(name)}{_tensor_text(targets_B[0])}", _FIX_DATA, spec)
        is_converted = spec.kind == "integer" and spec.geometry != "mask"
        converted_B = targets_B.to(torch.int64) if is_converted else targets_B
        if not _are_in_bounds(converted_B, spec):
            place = int(_out_of_bounds(converted_B, spec).to(torch.int8).argmax())
            raise self._misfit(
                first + place,
                f"{_named(name)}{_tensor_text(targets_B[place])}",
                _FIX_CLASS if spec.kind == "integer" else _FIX_VALUE,
                spec,
            )
        return converted_B

    def _misfit(
        self, place: int, description: str, remedy: str, spec: TargetSpec | None = None
    ) -> MisfitError:
        needed = spec or self.spec
        if needed is None:
            return MisfitError(place, f"{description}; return a number, a tensor, an array or a PIL image")
        requirement = f"a dict with {', '.join(needed)}" if isinstance(needed, dict) else str(needed)
        return MisfitError(place, f"{description}, and task {self.task} needs {requirement}; {remedy}")


def parts_moved_as(geometry: str, spec: TargetSpecs, targets: Tensors) -> Iterator[tuple[str, Any]]:
    """Yield the name (empty for a single tensor) and the part of each target with this ``geometry``."""
    specs = spec.items() if isinstance(spec, dict) else [("", spec)]
    for name, item in specs:
        if item is not None and item.geometry == geometry:
            yield name, targets[name] if name else targets


def as_targets(target: Any) -> Tensors:
    """Return a sample's target as a tensor, or as a structure of tensors.

    A dict is a structure, and so is a tuple that contains a tensor, an array, an image or a structure; a
    tuple of numbers is a tensor. Raises TypeError, ValueError or RuntimeError for anything but numbers.
    """
    if isinstance(target, Mapping):
        return {str(key): as_targets(value) for key, value in target.items()}
    if isinstance(target, tuple) and any(map(_has_dimensions, target)):
        return tuple(as_targets(value) for value in target)
    return as_target(target)


def _has_dimensions(part: Any) -> bool:
    if isinstance(part, (Tensor, np.ndarray)):
        return part.ndim > 0
    return isinstance(part, (Image.Image, Mapping, tuple))


def as_target(target: Any) -> Tensor:
    """Return a target as a tensor with its dtype and shape.

    A Python int becomes int64, a bool bool, a float torch's default dtype (float32); so do lists of them.
    Raises TypeError, ValueError or RuntimeError for anything that does not consist of numbers.
    """
    if isinstance(target, Tensor):
        return target
    if isinstance(target, (np.ndarray, np.generic, Image.Image)):
        return torch.from_numpy(np.array(target))  # a copy: torch rejects read-only and flipped arrays
    return torch.tensor(target)


def _stack(targets: Sequence[Tensor], indices: Sequence[int], name: str) -> Tensor:
    first = targets[0]
    for index, target in zip(indices, targets, strict=True):
        if (target.dtype, target.shape) != (first.dtype, first.shape):
            raise BadFileError(
                f"data: sample {indices[0]} has the target {_named(name)}{_tensor_text(first)}, and sample "
                f"{index} {_tensor_text(target)}; return targets of the same dtype and shape"
            )
    return torch.stack(list(targets))


def refuse_moved_masks(images: Sequence[Tensor] | Tensor, targets: Tensors, key: str | None) -> None:
    """Raise BadFileError if ``key`` flips, crops or resizes images but not their masks or boxes.

    In a structure any part with two dimensions or more per sample may be a mask or boxes.
    """
    if key is None:
        return
    sides = images[0].shape[-2:]
    remedy = "take it out, and transform image and target together in the data set"
    if isinstance(targets, Tensor):
        if targets.dim() > 2 and targets.shape[-2:] == sides:
            raise BadFileError(
                f"{key}: moves the pixels of the image, but not those of its {sides[0]}x{sides[1]} target; "
                f"{remedy}"
            )
        return
    samples = map_tensors(lambda part: part[0], targets, of_list=lambda parts: parts[0])
    moved = next((part for part in tensors_of(samples) if part.dim() > 1), None)
    if moved is not None:
        raise BadFileError(
            f"{key}: moves the pixels of the image, but not its target of shape {tuple(moved.shape)}; "
            f"{remedy}"
        )


def _has_kind(targets: Tensor, spec: TargetSpec) -> bool:
    if spec.kind == "float":
        return targets.is_floating_point()
    return spec.kind == "any" or not (targets.is_floating_point() or targets.is_complex())


def _has_shape(targets_B: Tensor, spec: TargetSpec) -> bool:
    if spec.shape is None:
        return True
    shape = targets_B.shape[1:]
    return len(shape) == len(spec.shape) and all(
        wanted in (None, size) for size, wanted in zip(shape, spec.shape, strict=True)
    )


def _are_in_bounds(targets_B: Tensor, spec: TargetSpec) -> bool:
    """Return True if all values are; in one pass, since each batch is checked."""
    if spec.total is not None and bool(_out_of_bounds(targets_B, spec).any()):
        return False
    if (spec.minimum is None and spec.maximum is None) or targets_B.numel() == 0:
        return True
    lowest, highest = (value.item() for value in targets_B.aminmax())  # both NaN if a value is
    fit = (lowest == lowest if spec.minimum is None else lowest >= spec.minimum) and (
        highest == highest if spec.maximum is None else highest <= spec.maximum
    )
    return fit or (spec.ignored is not None and not bool(_out_of_bounds(targets_B, spec).any()))


def _out_of_bounds(targets_B: Tensor, spec: TargetSpec) -> Tensor:
    """Return (B,) bool, True for samples with a value out of bounds; NaN always is."""
    fits = torch.ones_like(targets_B, dtype=torch.bool)
    if spec.minimum is not None:
        fits &= targets_B >= spec.minimum
    if spec.maximum is not None:
        fits &= targets_B <= spec.maximum
    if spec.ignored is not None:
        fits |= targets_B == spec.ignored
    fits_B = fits.reshape(len(targets_B), math.prod(targets_B.shape[1:])).all(dim=1)
    if spec.total is not None:
        fits_B &= (targets_B.float().flatten(1).sum(1) - spec.total).abs() <= _SUM_TOLERANCE
    return ~fits_B


def _named(name: str) -> str:
    return f"'{name}' " if name else ""


def _structure_text(targets: Tensors) -> str:
    if isinstance(targets, Tensor):
        return _tensor_text(targets)
    if isinstance(targets, dict):
        return f"a dict with {', '.join(targets) or 'nothing'}"
    return f"a {type(targets).__name__}"


def _tensor_text(target: Tensor) -> str:
    dtype, shape = str(target.dtype).removeprefix("torch."), tuple(target.shape)
    if target.dim() == 0:
        return f"{target.item()} ({dtype} of shape ())"
    if target.numel() == 0 or target.is_complex():
        return f"of {dtype}, shape {shape}"
    return f"of {dtype}, shape {shape}, values {target.min().item()} to {target.max().item()}"
