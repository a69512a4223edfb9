"""Reads the samples of a slot and prepares them as a batch. Runs in the loader processes.

Legend: B samples.
"""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc_train.errors import BadFileError, HpcTrainError, TransientStorageError
from hpc_train.run.bad_samples import BadSample, Part
from hpc_train.training.datasets import images, random_numbers, skipping
from hpc_train.training.datasets.base import AnySplit, ArraySplit, FileSplit, Split, TensorSplit
from hpc_train.training.datasets.decoding import UndecodableError, read_image
from hpc_train.training.datasets.packed import DamagedPackError
from hpc_train.training.datasets.sampler import Slot
from hpc_train.training.datasets.sources.text import TextSplit
from hpc_train.training.datasets.targets import MisfitError, TargetCheck
from hpc_train.training.datasets.types import Batch, Tensors, is_structured

#: Errors of a disk or file server that may be temporary; they do not mean that the sample is bad. Assumed.
_TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_PAUSES_S = (0.1, 1.0)
#: Errors that end the attempt even if bad samples are skipped, because the sample is not the cause.
_NOT_BAD = (TransientStorageError, DamagedPackError)
_Result = TypeVar("_Result")
#: The inputs of a batch, or of B samples one by one (JPEG files not decoded yet), its targets and slot → the
#: batch's inputs and targets. Raises UndecodableError.
Prepare = Callable[[Tensors | Sequence[Tensors], Tensors, Slot], tuple[Tensors, Tensors]]


class LoaderError(HpcTrainError):
    """An exception of a loader process, as text."""


@dataclass(frozen=True)
class Failure:
    """Returned by a loader process instead of a batch; the rank raises its ``error``.

    An exception that crosses the loader loses its fields and gets the loader process's traceback.
    """

    message: str
    #: ``data``: the data are wrong. ``transient``: a temporary error of the disk or of memory. ``crash``: an
    #: exception that can't be pickled; the message is its traceback.
    kind: Literal["data", "transient", "crash"] = "data"

    @property
    def error(self) -> HpcTrainError:
        """Return the exception to raise on the rank."""
        errors = {"data": BadFileError, "transient": TransientStorageError, "crash": LoaderError}
        return errors[self.kind](self.message)


@dataclass(frozen=True)
class Read:
    """A batch, and the samples that could not be read for it."""

    batch: Batch
    bad: tuple[BadSample, ...] = ()

    def pin_memory(self) -> Read:
        """Return a copy with the batch in pinned memory; called by the loader."""
        return replace(self, batch=self.batch.pin_memory())


class SlotReader(Dataset[Read | Failure]):
    """A split as a loader's data set, indexed by slots.

    With ``skip_bad`` a sample that can't be read is replaced by another sample, with that sample's class but
    with the augmentation of the bad sample's index. In validation data the replacement is padding and not
    valid. Data sets that are read in whole batches (``ArraySplit``) have no bad samples.
    """

    def __init__(
        self,
        split: AnySplit,
        channels: int | None,
        seed: int,
        prepare: Prepare,
        targets: TargetCheck,
        *,
        part: Part = "train",
        skip_bad: bool = False,
        rules: images.PixelRules = images.DEFAULT_RULES,
    ) -> None:
        self._split = split
        # Once: a protocol check takes as long as reading a small sample.
        self._arrays: ArraySplit | None = None
        self._files: FileSplit | None = None
        self._samples: Split | None = None
        if isinstance(split, ArraySplit):
            self._arrays = split
        elif isinstance(split, FileSplit):
            self._files = split
        else:
            self._samples = split
        #: For a split with image sizes: raises BadFileError for a sample of another size.
        self._check_sides: Callable[[int, int, int], None] | None = getattr(split, "check_sides", None)
        self._channels = channels
        self._seed = seed
        self._prepare = prepare
        self._targets = targets
        #: True if all samples are in memory, and known to fit.
        self.is_in_memory = _fits_as_a_whole(split, channels, targets)
        self._part: Part = part
        self._skip_bad = skip_bad
        self._rules = rules

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, slot: Slot) -> Read | Failure:
        """Return the slot's batch; an error that the user can fix is returned as a Failure, not raised."""
        bad: dict[int, BadSample] = {}
        try:
            inputs, targets, sides = self._read(slot, bad)
        except BadFileError as error:
            return Failure(str(error))
        except TransientStorageError as error:
            return Failure(str(error), kind="transient")
        count = slot.indices.shape[0]
        valid = torch.ones(count, dtype=torch.bool)
        if slot.num_valid < count:
            valid[slot.num_valid :] = False
        if bad and self._part == "val":
            valid &= torch.tensor([index not in bad for index in slot.indices.tolist()])
        samples = slot.indices.numpy().tobytes()
        batch = Batch(slot.step, slot.number, slot.weight, inputs, targets, valid, sides, samples=samples)
        return Read(batch, tuple(bad.values()))

    def read(self, slot: Slot) -> Read:
        """Return the slot's batch, in the rank's own process. Raises the error of a failure."""
        read = self.__getitems__(slot)
        if isinstance(read, Failure):
            raise read.error
        return read

    def _read(self, slot: Slot, bad: dict[int, BadSample]) -> tuple[Tensors, Tensors, Tensor | None]:
        """Return prepared inputs and targets, and ``sides``; bad samples are added to ``bad`` by index."""
        if self._arrays is not None:
            inputs, targets = self._whole_batch(self._arrays, slot)
            return *self._prepare(inputs, targets, slot), self._sides(inputs)
        undecodable: dict[int, BadSample] = {}
        while True:
            bad.clear()  # in the order of the batch, as if all had been decoded together
            samples, targets = self._one_by_one(slot, bad, undecodable)
            try:
                return *self._prepare(samples, targets, slot), self._sides(samples)
            except UndecodableError as error:
                # Rare: the batch is read again, with another sample in its place.
                undecodable[error.index] = self._undecodable(error)

    def _sides(self, inputs: Tensors | Sequence[Tensors]) -> Tensor | None:
        if self._part == "train" or is_structured(inputs) or is_structured(inputs[0]) or inputs[0].dim() != 3:
            return None
        if isinstance(inputs, Tensor):
            return torch.tensor(inputs.shape[-2:]).repeat(len(inputs), 1)
        return torch.tensor([image.shape[-2:] for image in inputs])

    def _undecodable(self, error: UndecodableError) -> BadSample:
        """Return the sample to replace. Raises BadFileError if bad samples are not skipped, and
        TransientStorageError if memory was the cause.
        """
        cause = error.__cause__
        assert isinstance(cause, Exception)
        sample = self._bad_sample(error.index, cause)
        if isinstance(cause, MemoryError):
            raise _transient(sample) from cause
        if not self._skip_bad:
            raise _unusable(sample, cause) from cause
        return sample

    def _one_by_one(
        self, slot: Slot, bad: dict[int, BadSample], undecodable: dict[int, BadSample]
    ) -> tuple[list[Tensors], Tensors]:
        with random_numbers.restored_generators():
            samples = [
                # Another rank reports bad samples in the padding.
                self._sample(slot.epoch, index, bad if place < slot.num_valid else {}, undecodable)
                for place, index in enumerate(slot.indices.tolist())
            ]
        inputs, targets = zip(*samples, strict=True)
        return list(inputs), self._targets.stacked(targets, slot.indices.tolist())

    def _whole_batch(self, split: ArraySplit, slot: Slot) -> tuple[Tensors, Tensors]:
        read: Any = _retried(
            lambda: split.batch(slot.indices), lambda error: self._transient_batch(slot, error)
        )
        if self.is_in_memory:
            return cast("tuple[Tensors, Tensors]", read)
        count = len(slot.indices)
        is_pair = isinstance(read, tuple) and len(read) == 2 and not isinstance(read[0], list)
        if not (is_pair and all(_has_rows(part, count) for part in read)):
            raise BadFileError(
                f"data.name: {type(split).__name__}.batch must return (inputs, targets), tensors of {count} "
                f"samples for {count} indices"
            )
        inputs, targets = read
        if not is_structured(inputs):
            self._check_inputs(inputs, type(split).__name__)
        try:
            return inputs, self._targets.batch(targets)
        except MisfitError as error:
            index = int(slot.indices[error.place])
            raise error.of_sample(BadSample(self._part, index, f"sample {index}", "").title) from error

    def _transient_batch(self, slot: Slot, error: Exception) -> TransientStorageError:
        first = self._bad_sample(int(slot.indices[0]), error)
        return TransientStorageError(
            f"data: the batch of {first.title} can't be read at the moment: {first.why}"
        )

    def _check_inputs(self, inputs: Tensor, name: str) -> None:
        is_image = inputs.dtype == torch.uint8 and inputs.dim() == 4
        if not (is_image or inputs.dtype == torch.int64 or inputs.is_floating_point()):
            raise BadFileError(
                f"data.name: {name}.batch returned inputs of {inputs.dtype} and shape {tuple(inputs.shape)}; "
                "return uint8 images (B, C, H, W), float images or features, or int64 tokens"
            )
        if is_image and self._channels not in (None, inputs.shape[1]):
            raise BadFileError(
                f"data.name: {name}.batch returned images of {inputs.shape[1]} channels, and its DataInfo "
                f"has channels={self._channels}; make them the same"
            )

    def _sample(
        self, epoch: int, index: int, bad: dict[int, BadSample], undecodable: dict[int, BadSample]
    ) -> tuple[Tensors, Tensors]:
        if index in undecodable:
            first = bad[index] = undecodable[index]
        else:
            try:
                return self._try_sample(index, random_numbers.hash_words(self._seed, epoch, index))
            except _NOT_BAD:
                raise
            except Exception as error:
                first = self._bad_sample(index, error)
                if not self._skip_bad:
                    raise _unusable(first, error) from error
                bad[index] = first
        for word, other in skipping.stand_ins(self._seed, epoch, index, len(self._split)):
            if other in undecodable:
                bad[other] = undecodable[other]
                continue
            try:
                return self._try_sample(other, word)
            except _NOT_BAD:
                raise
            except Exception as error:
                bad[other] = self._bad_sample(other, error)
        raise BadFileError(f"{_unreadable(first)}; nor can any of its replacements")

    def _try_sample(self, index: int, seed: int) -> tuple[Tensors, Tensors]:
        def read() -> tuple[Tensors, Tensors]:
            inputs, target = self._load(index, seed)
            fitting = self._targets.one(target)
            if not is_structured(inputs):
                self._targets.refuse_other_sides(fitting, inputs.shape[-2:])
                if self._check_sides is not None:
                    self._check_sides(index, *inputs.shape[-2:])
            return inputs, fitting

        return _retried(read, lambda error: _transient(self._bad_sample(index, error)))

    def _load(self, index: int, seed: int) -> tuple[Tensors, Any]:
        """Return a sample's inputs (JPEG files not decoded yet) and its stored target."""
        if self._files is not None:
            content, target = self._files.file_content(index)
            return read_image(content, self._files.channels, index, self._rules), target
        assert self._samples is not None, "ArraySplit is read in whole batches"
        random_numbers.seed_generators(seed)
        inputs, target = images.inputs_and_target(self._samples[index])
        return images.as_inputs(inputs, self._channels), target

    def _bad_sample(self, index: int, error: Exception) -> BadSample:
        path = images.sample_path(self._split, index)
        name = f"sample {index}" if path is None else str(path)
        return BadSample(self._part, index, name, _cause(error))


def _fits_as_a_whole(split: AnySplit, channels: int | None, targets: TargetCheck) -> bool:
    """Return True if the split is in memory and all samples fit, so that no batch needs a check."""
    if type(split) is TensorSplit:
        return channels in (None, split.images.shape[1]) and targets.accepts(split.targets)
    return type(split) is TextSplit and targets.accepts(split.extremes())


def _retried(read: Callable[[], _Result], transient: Callable[[Exception], TransientStorageError]) -> _Result:
    """Return the result of ``read``, which is retried after errors that may be temporary.

    Raises the result of ``transient`` for the last error.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return read()
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno not in _TRANSIENT_ERRNOS:
                raise
            if pause_s is None:
                raise transient(error) from error
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _has_rows(part: Any, count: int) -> bool:
    """Return True if all tensors have ``count`` samples."""
    if is_structured(part):
        return all(_has_rows(value, count) for value in (part.values() if isinstance(part, dict) else part))
    if isinstance(part, list):
        return len(part) == count and all(isinstance(value, Tensor) for value in part)
    return isinstance(part, Tensor) and part.dim() > 0 and len(part) == count


def _unusable(sample: BadSample, error: Exception) -> BadFileError:
    if isinstance(error, MisfitError):
        return error.of_sample(sample.title)
    unreadable = _unreadable(sample)
    if isinstance(error, (OSError, SyntaxError)) and "`" not in sample.why:  # of Pillow, without a remedy
        return BadFileError(f"{unreadable}; replace the file, or write data.on_bad_sample: skip")
    return unreadable


def _transient(sample: BadSample) -> TransientStorageError:
    return TransientStorageError(f"data: {sample.title} can't be read at the moment: {sample.why}")


def _unreadable(sample: BadSample) -> BadFileError:
    return BadFileError(f"data: {sample.title} can't be read: {sample.why}")


def _cause(error: Exception) -> str:
    if isinstance(error, BadFileError):
        return str(error).removeprefix("data: ")
    if isinstance(error, MisfitError):
        return f"it has the target {error}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (OSError, SyntaxError)):  # raised by Pillow for bad files
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} (at {place.filename}:{place.lineno})"


def unchanged(batch: Any) -> Any:
    """Collate for loaders whose data set returns whole batches."""
    return batch
