"""The batches of training and evaluation, as CPU tensors. Called by the training loop and evaluation.

Legend: m micro-batch, M micro-batches of a step, R ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import AugmentConfig, DataConfig
from hpc_train.experiment.data_facts.image_facts import only_for_masks
from hpc_train.run.bad_samples import BadSample
from hpc_train.training.datasets.augment import Augmentation
from hpc_train.training.datasets.base import AnySplit, DataSource, RawInput
from hpc_train.training.datasets.decoding import decode, decoded
from hpc_train.training.datasets.images import (
    ImageSplit,
    PixelRules,
    centre_square,
    image_content,
    stack,
    stack_inputs,
)
from hpc_train.training.datasets.joint import JointTransform, moves_targets
from hpc_train.training.datasets.random_numbers import Keys
from hpc_train.training.datasets.reading import Prepare, SlotReader
from hpc_train.training.datasets.sampler import EvaluationSampler, MicroBatchSampler, Position, Slot
from hpc_train.training.datasets.skipping import BadSamples
from hpc_train.training.datasets.targets import TargetCheck, refuse_moved_masks
from hpc_train.training.datasets.transforms import OwnTransform
from hpc_train.training.datasets.types import Batch, TargetSpecs, Tensors, is_structured
from hpc_train.training.datasets.workers import BatchStream

#: Maximum delay until a rank that waits for its data notices a stop request (assumed).
_LOOK_EVERY_S = 0.2
#: Maximum size of a rank's validation batches that stay in memory between evaluations (assumed).
_MAX_KEPT_BYTES = 64 << 20
#: Samples of each split that ``prepare`` reads, evenly spaced (assumed).
_TRIED_SAMPLES = 16


class TrainingBatches(Iterator[tuple[int, list[Batch]]]):
    """Yields (step, this rank's micro-batches); steps count from 0, starting at the position.

    ``close`` ends the loader processes early; so does a ``with`` block.
    """

    def __init__(
        self, stream: BatchStream, sampler: MicroBatchSampler, reader: SlotReader, bad: BadSamples | None
    ) -> None:
        self.stream, self.sampler, self._reader, self._bad_samples = stream, sampler, reader, bad
        self._slots_per_step = sampler.slots_per_step

    def __next__(self) -> tuple[int, list[Batch]]:
        reads = [next(self.stream) for _ in range(self._slots_per_step)]
        if self._bad_samples is not None:
            self._bad_samples.note(sample for read in reads for sample in read.bad)
        return reads[0].batch.step, [read.batch for read in reads]

    def of_rank(self, rank: int, step: int) -> list[Batch]:
        """Read any rank's micro-batches of a step, in this process. Bad samples are not recorded."""
        return [self._reader.read(slot).batch for slot in self.sampler.of_rank(rank, step)]

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return True if the next step (or its error, or the end) has arrived, so that ``next`` won't wait.

        Waits up to ``within_s`` for it, so that polling takes no time from the rank's loader processes.
        Always true without loader processes, because then the rank itself reads.
        """
        return self.stream.holds(self._slots_per_step, within_s)

    def close(self) -> None:
        """End the loader processes."""
        self.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def training_batches(
    source: DataSource,
    experiment: Experiment,
    position: Position,
    total_steps: int,
    rank: int,
    world_size: int,
    device: torch.device,
    bad_samples: BadSamples | None = None,
    target_spec: TargetSpecs = None,
) -> TrainingBatches:
    """Return this rank's steps from ``position`` to ``total_steps``; loader processes start immediately.

    Batches are on the CPU, pinned if ``device`` is CUDA; uint8, not normalised, unless the data are float. A
    sample that can't be read, or whose target does not fit ``target_spec``, is recorded in ``bad_samples``
    and replaced; without ``bad_samples`` it is an error.
    """
    sampler = MicroBatchSampler(
        len(source.train),
        global_batch_size=experiment.optimization.global_batch_size,
        micro_batch_size=_micro_batch_size(experiment),
        seed=experiment.seed,
        repeats=experiment.data.augment.repeats,
        position=position,
        total_steps=total_steps,
        rank=rank,
        world_size=world_size,
    )
    reader = _training_reader(source, experiment, target_spec, skip_bad=bad_samples is not None)
    stream = BatchStream(reader, sampler, workers=experiment.workers, device=device)
    return TrainingBatches(stream, sampler, reader, bad_samples)


@dataclass
class EvaluationBatches:
    """This rank's share of a split, restarted by each ``iter``; loader processes live for one pass.

    ``keeps``: whether a small share stays in memory after a whole pass, so that the evaluations of small data
    neither start processes nor decode again.
    """

    reader: SlotReader
    sampler: EvaluationSampler
    workers: int
    device: torch.device
    bad_samples: BadSamples | None
    keeps: bool = False
    #: The batches of a whole pass.
    _kept: list[Batch] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.until(lambda: False):
            assert batch is not None
            yield batch

    def until(self, gives_up: Callable[[], bool]) -> Iterator[Batch | None]:
        """Yield the batches; None, and no more, if one does not arrive and ``gives_up`` returns true."""
        if self._kept is not None:
            yield from map(self._unshared, self._kept)
            return
        kept: list[Batch] = []
        free_bytes = _MAX_KEPT_BYTES if self.keeps else 0
        workers = min(self.workers, len(self))
        stream = BatchStream(self.reader, self.sampler, workers=workers, device=self.device)
        try:
            for _ in range(len(self)):
                while not stream.holds(1, within_s=_LOOK_EVERY_S):
                    if gives_up():
                        yield None
                        return
                read = next(stream)
                if self.bad_samples is not None:
                    self.bad_samples.note(read.bad)
                free_bytes -= read.batch.nbytes
                if free_bytes >= 0:
                    kept.append(self._unshared(read.batch))
                yield read.batch
            self._kept = kept if free_bytes >= 0 else None
        finally:
            stream.close()

    def _unshared(self, batch: Batch) -> Batch:
        """Return a copy that the model may overwrite; ``to`` makes it for another device."""
        return batch.clone() if self.device.type == "cpu" else batch


def evaluation_batches(
    split: AnySplit,
    experiment: Experiment,
    rank: int,
    world_size: int,
    device: torch.device,
    bad_samples: BadSamples | None = None,
    target_spec: TargetSpecs = None,
    *,
    has_targets: bool = True,
    keeps: bool = False,
) -> EvaluationBatches:
    """Return this rank's batches of ``split``: the same number on every rank, each of exactly m samples.

    Each sample is valid in exactly one batch of one rank, or in none if it can't be read and is recorded in
    ``bad_samples``. ``step`` is 0, ``weight`` 1 and ``number`` the batch's index in the whole evaluation.
    Without ``has_targets`` the images are resized as for the task, and targets are neither checked nor moved.
    """
    skip_bad = bad_samples is not None
    reader = _evaluation_reader(split, experiment, target_spec, skip_bad=skip_bad, has_targets=has_targets)
    sampler = EvaluationSampler(len(split), _micro_batch_size(experiment), rank, world_size)
    return EvaluationBatches(reader, sampler, experiment.workers, device, bad_samples, keeps=keeps)


def evaluation_batch_count(split: AnySplit, micro_batch_size: int) -> int:
    """Return the number of batches of the whole evaluation, over all ranks, without padding batches."""
    return math.ceil(len(split) / micro_batch_size)


def _micro_batch_size(experiment: Experiment) -> int:
    size = experiment.optimization.micro_batch_size
    assert isinstance(size, int), "micro_batch_size: auto must be resolved first"
    return size


def try_samples(
    source: DataSource, experiment: Experiment, target_spec: TargetSpecs
) -> tuple[list[Batch], list[BadSample]]:
    """Read some samples of each split exactly as ranks do, without loader processes.

    Returns a batch of training samples, one of validation samples if there are any, and the samples that
    ``data.on_bad_sample: skip`` would replace. Raises BadFileError or TransientStorageError, as training
    would.
    """
    skip_bad = experiment.data.on_bad_sample == "skip"
    readers = [_training_reader(source, experiment, target_spec, skip_bad=skip_bad)]
    if source.val is not None:
        readers.append(_evaluation_reader(source.val, experiment, target_spec, skip_bad=skip_bad))
    batches: list[Batch] = []
    bad: list[BadSample] = []
    for reader in readers:
        count = min(len(reader), _TRIED_SAMPLES)
        indices = torch.linspace(0, len(reader) - 1, count, dtype=torch.float64).round().to(torch.int64)
        read = reader.read(Slot(0, 0, 0, 0, 1.0, indices, count))
        batches.append(read.batch)
        bad += read.bad
    return batches, bad


@dataclass(frozen=True)
class _Samples:
    """A split of inputs without targets; a path is that of an image file."""

    samples: Sequence[RawInput | str | Path]
    channels: int
    rules: PixelRules

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> tuple[RawInput, int]:
        sample = self.samples[index]
        if isinstance(sample, str | Path):
            sample = decode(image_content(os.fspath(sample)), self.channels, self.rules)
        return sample, 0


def prepared_inputs(
    samples: Sequence[RawInput | str | Path], channels: int, experiment: Experiment, target_spec: TargetSpecs
) -> Tensors:
    """Return the inputs of samples that need not belong to the data, read and resized as in an evaluation.

    Raises BadFileError for a sample that can't be read.
    """
    split = ImageSplit(_Samples(samples, channels, PixelRules.of(experiment.data)), channels)
    reader = _evaluation_reader(split, experiment, target_spec, skip_bad=False, has_targets=False)
    return reader.read(Slot(0, 0, 0, 0, 1.0, torch.arange(len(samples)), len(samples))).batch.inputs


def _training_reader(
    source: DataSource, experiment: Experiment, target_spec: TargetSpecs, *, skip_bad: bool
) -> SlotReader:
    data, seed = experiment.data, experiment.seed
    augmentation = Augmentation(data.augment, _square(data, target_spec), seed, data.interpolation)
    moving_key, image_key = _moving_key(data), _image_key(data)

    def prepare_images(inputs: Tensors | Sequence[Tensors], targets: Tensors, slot: Slot) -> Tensors:
        if image_key is None and isinstance(inputs, Tensor) and inputs.dim() != 4:
            return inputs
        _refuse_no_images(inputs, image_key)
        if not isinstance(inputs, Tensor) and is_structured(_first(inputs)):
            return inputs if is_structured(inputs) else stack_inputs(inputs)
        refuse_moved_masks(inputs, targets, moving_key or _resizing_key(inputs, data))
        return augmentation(inputs, slot.epoch, slot.indices, slot.repeats)

    prepare = _prepare(prepare_images, data, seed, target_spec, is_training=True)
    if data.transform is not None:
        prepare = _transformed_first(
            OwnTransform(data.transform, source.info.channels), seed, target_spec, prepare
        )
    targets = TargetCheck(experiment.task, target_spec)
    return SlotReader(
        source.train,
        source.info.channels,
        seed,
        prepare,
        targets,
        skip_bad=skip_bad,
        rules=PixelRules.of(data),
    )


def _evaluation_reader(
    split: AnySplit,
    experiment: Experiment,
    target_spec: TargetSpecs,
    *,
    skip_bad: bool,
    has_targets: bool = True,
) -> SlotReader:
    data, size = experiment.data, _square(experiment.data, target_spec)
    image_key = _image_key(data)

    def prepare_images(inputs: Tensors | Sequence[Tensors], targets: Tensors, slot: Slot) -> Tensors:
        _refuse_no_images(inputs, image_key)
        if not is_structured(_first(inputs)):
            refuse_moved_masks(inputs, targets, _resizing_key(inputs, data))
        if size is not None:
            return stack(
                [centre_square(decoded(image), size, data.eval_crop, data.interpolation) for image in inputs]
            )
        return stack_inputs([*map(decoded, inputs)]) if isinstance(inputs, list) else inputs

    prepare = _prepare(
        prepare_images, data, experiment.seed, target_spec, is_training=False, has_targets=has_targets
    )
    targets = TargetCheck(experiment.task, target_spec if has_targets else None)
    return SlotReader(
        split,
        None,
        experiment.seed,
        prepare,
        targets,
        part="val",
        skip_bad=skip_bad,
        rules=PixelRules.of(data),
    )


def _transformed_first(
    transform: OwnTransform, seed: int, target_spec: TargetSpecs, then: Prepare
) -> Prepare:
    """Return a function that applies ``data.transform`` to each sample before ``then``."""

    def prepare(inputs: Any, targets: Tensors, slot: Slot) -> tuple[Tensors, Tensors]:
        if is_structured(inputs):
            raise BadFileError(
                "data.transform: transforms one sample at a time, and the data set returns batches of "
                "several inputs; take it out, and transform them in the data set"
            )
        keys = Keys(seed, slot.epoch, slot.indices, slot.repeats)
        if moves_targets(target_spec):
            inputs, targets = transform.with_targets(inputs, targets, target_spec, keys, slot.indices)
        else:
            if not is_structured(_first(inputs)):
                refuse_moved_masks(inputs, targets, "data.transform")
            inputs = transform.inputs(inputs, keys, slot.indices)
        return then(inputs, targets, slot)

    return prepare


def _square(data: DataConfig, target_spec: TargetSpecs) -> int | None:
    """Return the side to which images without masks and boxes are resized."""
    if moves_targets(target_spec):
        return None
    if problem := only_for_masks(data):
        raise problem.as_error()
    assert not isinstance(data.image_size, tuple)
    return data.image_size


def _prepare(
    images: Callable[[Any, Tensors, Slot], Tensors],
    data: DataConfig,
    seed: int,
    target_spec: TargetSpecs,
    *,
    is_training: bool,
    has_targets: bool = True,
) -> Prepare:
    """Return a function that prepares inputs and targets; ``images`` prepares inputs alone."""
    if not moves_targets(target_spec):
        return lambda inputs, targets, slot: (images(inputs, targets, slot), targets)
    joint = JointTransform(data, seed, target_spec if has_targets else None, is_training=is_training)

    def prepare(inputs: Any, targets: Tensors, slot: Slot) -> tuple[Tensors, Tensors]:
        if is_structured(_first(inputs)) or _first(inputs).dim() != 3:
            raise BadFileError(
                "data: samples with masks or boxes must have one image (C, H, W) as their input; return "
                "that, or name a task whose target_spec has no geometry"
            )
        return joint(inputs, targets, slot)

    return prepare


def _moving_key(data: DataConfig) -> str | None:
    """Return the first key of ``data.augment`` that moves pixels."""
    keys = ("random_resized_crop", "crop_padding", "hflip", "vflip", "randaugment", "policy")
    return next((f"data.augment.{key}" for key in keys if getattr(data.augment, key)), None)


def _resizing_key(images: Tensor | Sequence[Tensor], data: DataConfig) -> str | None:
    """Return ``data.image_size`` if it changes the first image."""
    size = data.height_and_width
    is_same = size is None or (images[0].shape[-2:] == size and data.eval_crop == 1)
    return None if is_same else "data.image_size"


def _first(inputs: Tensors | Sequence[Tensors]) -> Tensors:
    """Return the inputs of one sample; a structure of whole batches is returned itself."""
    return inputs if is_structured(inputs) else inputs[0]


def _image_key(data: DataConfig) -> str | None:
    """Return the first key of the file that resizes or augments images."""
    if data.augment != AugmentConfig():
        return "data.augment"
    return None if data.image_size is None else "data.image_size"


def _refuse_no_images(inputs: Tensors | Sequence[Tensors], key: str | None) -> None:
    """Raise BadFileError if a sample is not one image, and ``key`` resizes or augments images."""
    if key is None or (isinstance(inputs, Tensor) and inputs.dim() == 4):
        return
    sample = _first(inputs)
    if is_structured(sample):
        difference = "have several inputs"
    elif sample.dim() != 3:
        difference = f"have shape {tuple(sample.shape)}"
    else:
        return
    raise BadFileError(f"{key}: is for images, and samples {difference}; take it out")
