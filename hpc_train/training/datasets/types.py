"""Facts about a data set for the model and the task, a task's requirements on targets, and a batch.

Shared by data sets, models, tasks and strategies, which don't import each other. Inputs and targets are
tensors, or dicts, tuples and lists of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hpc_train.errors import BadFileError

#: Bounds of a target that must be a finite number: the maximum of float32.
FINITE = torch.finfo(torch.float32).max

#: A batch's tensor (B, …), a list of B tensors, or a dict or tuple of these.
Tensors = Any


def map_tensors(
    function: Callable[[Tensor], Any], tensors: Tensors, of_list: Callable[[list[Tensor]], Any] | None = None
) -> Any:
    """Return the same structure with ``function`` of each tensor, and ``of_list``, if set, of each list."""
    if isinstance(tensors, dict):
        return {key: map_tensors(function, value, of_list) for key, value in tensors.items()}
    if isinstance(tensors, tuple):
        return tuple(map_tensors(function, value, of_list) for value in tensors)
    if isinstance(tensors, list):
        return of_list(tensors) if of_list else [function(tensor) for tensor in tensors]
    return tensors if tensors is None else function(tensors)


def tensors_of(tensors: Tensors) -> Iterator[Tensor]:
    """Yield the tensors of a structure, and each tensor of a list."""
    collected: list[Tensor] = []
    map_tensors(collected.append, tensors)
    yield from collected


def is_structured(tensors: Tensors) -> bool:
    """Return True for a structure, False for a tensor or a list of tensors."""
    return isinstance(tensors, (dict, tuple))


def collate(samples: Sequence[Any], stack: Callable[[Sequence[Tensor], str], Any], name: str = "") -> Tensors:
    """Return the samples' common structure with ``stack`` of its tensors and their name (``a.0``).

    Raises BadFileError if two samples differ in structure.
    """
    if not any(map(is_structured, samples)):
        return stack(samples, name)
    first = _keys(samples[0])
    for sample in samples:
        if _keys(sample) != first:
            raise BadFileError(
                f"data: samples of one batch have {_parts_text(first)} and {_parts_text(_keys(sample))}"
                f"{f' in {name}' if name else ''}; return the same structure for each sample"
            )
    prefix = f"{name}." if name else ""
    keys = list(samples[0]) if isinstance(samples[0], dict) else range(len(samples[0]))
    parts = {key: collate([sample[key] for sample in samples], stack, f"{prefix}{key}") for key in keys}
    return parts if isinstance(samples[0], dict) else tuple(parts.values())


def _keys(sample: Any) -> tuple[Any, ...] | None:
    """Return the keys or indices of a structure; None for a tensor."""
    if isinstance(sample, dict):
        return tuple(sorted(sample, key=str))
    return tuple(range(len(sample))) if isinstance(sample, tuple) else None


def _parts_text(keys: tuple[Any, ...] | None) -> str:
    if keys is None:
        return "a single tensor"
    return f"the parts {', '.join(map(str, keys))}" if keys else "no parts"


@dataclass(frozen=True)
class DataInfo:
    """Facts about a data set for the model, the task and the normalisation on the device."""

    #: For sequences: the size of the vocabulary.
    num_classes: int
    #: For sequences: 0, and neither ``mean`` nor ``std``.
    channels: int
    #: One value per channel, for images scaled to 0…1.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    #: Tokens per sample; None: samples are images.
    sequence_length: int | None = None
    #: The value of pixels without a class in masks, and of tokens that are not predicted.
    ignore_index: int | None = None
    #: Shape of one sample's target: (), or (K,) for several classes, probabilities or numbers at once. Tasks
    #: with other targets (masks, boxes, tokens) don't read it.
    target_shape: tuple[int, ...] = ()
    #: Decoder of tokens without ``class_names``: ``bytes``, an encoding of tiktoken, or the path of a
    #: tokenizer.json.
    tokenizer: str | None = None

    @property
    def classes_hash(self) -> str:
        """Return a hash of the class names in the order of their numbers."""
        names = "\n".join(self.class_names).encode(errors="surrogatepass")
        return hashlib.sha256(names).hexdigest()[:16]


@dataclass(frozen=True)
class TargetSpec:
    """A task's requirements on the target of one sample; loaders and ``prepare`` reject other targets."""

    #: A phrase with the article: ``a class number``.
    description: str
    #: ``integer``: any integer dtype or bool, converted to int64. ``float``: any floating-point dtype, kept.
    kind: Literal["integer", "float", "any"] = "any"
    #: Shape of one sample, without the batch. None as a size: any size; None for all: any shape.
    shape: tuple[int | None, ...] | None = None
    #: The minimum and maximum value, inclusive; None: no bound.
    minimum: float | None = None
    maximum: float | None = None
    #: The sum of a sample's numbers, with a tolerance of 0.01; None: any sum.
    total: float | None = None
    #: Samples differ in shape (boxes, points): a batch has a list of B tensors instead of a tensor (B, …).
    is_ragged: bool = False
    #: Effect of crops, flips and resizing of the image on the target. ``mask``: (H, W), moved by nearest
    #: neighbour; an integer mask keeps its dtype. ``boxes``: (n, 4) of left, top, right, bottom in pixels,
    #: moved and clipped. ``per box``: n rows; the rows of dropped boxes are dropped. The last two are
    #: ragged. None: no effect; augmentation that moves pixels is refused for such targets.
    geometry: Literal["mask", "boxes", "per box"] | None = None
    #: A value that is allowed outside of the bounds; masks are padded with it (default: 0).
    ignored: int | None = None

    def __str__(self) -> str:
        kind = {"integer": "integers", "float": "floating-point numbers", "any": "numbers"}[self.kind]
        shape = "any shape" if self.shape is None else f"shape {_shape_text(self.shape)}"
        if self.maximum == FINITE:
            return f"{self.description} (finite {kind} of {shape})"
        low = "" if self.minimum is None else f", at least {self.minimum:g}"
        high = "" if self.maximum is None else f", at most {self.maximum:g}"
        high += "" if self.total is None else f", with the sum {self.total:g}"
        ignored = "" if self.ignored is None else f", or {self.ignored} to ignore"
        return f"{self.description} ({kind} of {shape}{low}{high}{ignored})"


def _shape_text(shape: tuple[int | None, ...]) -> str:
    """Return the shape as a tuple is written, such as ``(3, any)``."""
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


#: The spec of one tensor, or of the parts of a dict that the task reads; None: any target.
TargetSpecs = TargetSpec | dict[str, TargetSpec] | None


@dataclass(frozen=True)
class Batch:
    """One micro-batch, of training or evaluation.

    ``inputs`` and ``targets`` are each a tensor (B, …), or a dict or tuple of them; targets of samples that
    differ in shape are a list of B tensors. The loader creates them on the CPU (images uint8, not
    normalised; tokens int64; targets with the dtype and shape of the data set, or of the task's
    ``target_spec``); after ``to`` they are on the device. ``number`` is the index i of 0…M−1 in the step
    (or in the evaluation). ``weight`` is 1/M, or 0 for a spare slot. ``valid`` (B,) bool is false for
    padding. ``sides`` (B, 2) int64, for images in the evaluation: height and width before they were resized.
    ``loss_factor``, shape (), float64, only if the task has a ``weight``: M times the micro-batch's share of
    the step's weight. The loss that a strategy receives has been multiplied by it. ``samples``: the indices
    that were read, as int64 in the machine's byte order; they remain on the host, and after ``repeated``,
    ``first`` or ``taken`` they are still those of the loader's batch.
    """

    step: int
    number: int
    weight: float
    inputs: Tensors
    targets: Tensors
    valid: Tensor
    sides: Tensor | None = None
    loss_factor: Tensor | None = None
    samples: bytes = b""

    @property
    def indices(self) -> list[int]:
        """The indices of the samples in their split."""
        return torch.frombuffer(bytearray(self.samples), dtype=torch.int64).tolist() if self.samples else []

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; the copy is asynchronous if the memory is pinned."""
        if device.type == self.valid.device.type == "cpu":
            return self
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; called by the loader."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def clone(self) -> Batch:
        """Return a copy that shares no tensor."""
        return self._mapped(torch.clone)

    @property
    def nbytes(self) -> int:
        """The size of inputs and targets."""
        return sum(tensor.nbytes for tensor in tensors_of((self.inputs, self.targets)))

    def repeated(self, count: int) -> Batch:
        """Return a batch that has each sample ``count`` times."""
        return self._mapped(
            lambda tensor: tensor.repeat_interleave(count, 0),
            lambda samples: [sample for sample in samples for _ in range(count)],
        )

    def first(self, count: int) -> Batch:
        """Return a batch of the first ``count`` samples."""
        return self._mapped(lambda tensor: tensor[:count], lambda samples: samples[:count])

    def taken(self, indices: list[int]) -> Batch:
        """Return a batch of these samples."""
        return self._mapped(lambda tensor: tensor[indices], lambda samples: [samples[i] for i in indices])

    def changed(self, **values: Any) -> Batch:
        """Return a copy with other values; ``dataclasses.replace`` takes three times as long."""
        assert values.keys() <= vars(self).keys(), values.keys()
        copied = object.__new__(Batch)
        vars(copied).update(vars(self), **values)
        return copied

    def _mapped(
        self,
        function: Callable[[Tensor], Tensor],
        of_list: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> Batch:
        return self.changed(
            inputs=map_tensors(function, self.inputs, of_list),
            targets=map_tensors(function, self.targets, of_list),
            valid=function(self.valid),
            sides=map_tensors(function, self.sides),
        )
