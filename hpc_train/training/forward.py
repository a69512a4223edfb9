"""The computation for one micro-batch, in training (``strategies.base.Forward``) and in evaluation.

The loop and the batch-size search create one and pass it to the strategy, which calls it whole or, if ranks
own only some of the layers, piece by piece. Metrics of the training samples in a training row, such as their
accuracy, are computed from the same outputs as the loss, on the device, only in steps that have a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.training.compiling import begin_forward
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.random_numbers import hash_words, seed_forward
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.distributed.device import Precision
from hpc_train.training.tasks.base import Task, mean_loss, total_weight, weighs_batches
from hpc_train.training.train_state import TrainState


@runtime_checkable
class HasTrainingSums(Protocol):
    """A task with training metrics besides the loss."""

    #: The names in a ``train`` row; they do not depend on the data.
    training_metrics: tuple[str, ...]

    def training_sums(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum over all samples of the micro-batch for each name, shape (len(names),).

        In a pipeline ``batch.inputs`` is None. Runs without gradients.
        """


@dataclass
class TrainingSums:
    """The sums of a rank's micro-batches in one step."""

    task: HasTrainingSums | None = None
    device: torch.device | None = None
    _is_due: bool = False
    #: By micro-batch number, so that a micro-batch that runs twice (DDP's warm-up) counts once.
    _sums: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, task: object, device: torch.device) -> TrainingSums:
        """Return sums that remain empty if the task has no ``training_sums``."""
        return cls(task if isinstance(task, HasTrainingSums) else None, device)

    def begin(self, *, is_due: bool) -> None:
        """Start a step; nothing is computed if it has no row (``is_due``)."""
        self._is_due = is_due
        self._sums.clear()

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add a micro-batch; a spare slot is ignored."""
        if self._is_due and self.task is not None and batch.weight > 0:
            with torch.no_grad():
                self._sums[batch.number] = self.task.training_sums(outputs, batch)

    def result(self, *, owns_loss: bool) -> dict[str, Tensor]:
        """Return name → sum, shape (); 0 on ranks that don't own a loss. Empty if the step has no row."""
        if not self._is_due or self.task is None:
            return {}
        names = self.task.training_metrics
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for value in self._sums.values() if owns_loss else ():
            total += value
        return dict(zip(names, total, strict=True))


@dataclass(frozen=True)
class TrainingForward:
    """See ``strategies.base.Forward``."""

    seed: int
    task: Task
    device: torch.device
    compile: CompileConfig
    #: Context of a forward: autocast, unless the strategy handles mixed precision.
    context: Callable[[], AbstractContextManager[object]]
    #: Moves a loader's batch to the device and prepares its inputs for the model.
    to_device: Callable[[Batch], Batch]
    #: ``Optimization.scale``.
    scale: Callable[[Tensor], Tensor]
    #: Called with each batch that runs whole. Not in pipelines: their stages run batches in different orders,
    #: so the watchdog could not compare them.
    on_begin: Callable[[Batch], None] = lambda batch: None
    #: Called after that batch's forward.
    on_end: Callable[[], None] = lambda: None
    mixing: Mixing | None = None
    training_sums: TrainingSums = field(default_factory=TrainingSums)
    #: ``StepObserver.loss_computed``.
    on_loss: Callable[[Batch, Tensor], None] = lambda batch, loss: None

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        info: DataInfo,
        state: TrainState,
        task: Task,
        precision: Precision,
        device: torch.device,
    ) -> TrainingForward:
        """Return the forward for the file, with autocast if the strategy needs it."""

        is_autocast = precision.is_mixed and not state.strategy.handles_mixed_precision
        nothing = nullcontext()  # may be entered again and by several at once

        def context() -> AbstractContextManager[object]:
            return precision.autocast(device) if is_autocast else nothing

        return cls(
            experiment.seed,
            task,
            device,
            experiment.compile,
            context,
            make_to_input(experiment, info, device, precision),
            state.optimization.scale,
            mixing=Mixing.of(experiment, task),
            training_sums=TrainingSums.of(task, device),
        )

    def to_input(self, batch: Batch) -> Batch:
        """Return the batch on the device, its inputs prepared for the model and mixed by mixup or CutMix."""
        moved = self.to_device(batch)
        return moved if self.mixing is None else self.mixing.whole(moved)

    def with_loss_factors(self, batches: Sequence[Batch], *, owns_loss: bool) -> Sequence[Batch]:
        """Return this rank's micro-batches with their ``loss_factor``, if the task has a ``weight``.

        The mean loss of a micro-batch is weighted by its share of the step's weight. Collective over all
        ranks, but only ranks that own a loss contribute; does not wait for the device. Factors are 0 if the
        step's weight is 0.
        """
        if not weighs_batches(self.task):
            return batches
        weights = torch.stack([self._weight(batch) for batch in batches])
        total = weights.sum() if owns_loss else weights.new_zeros(())
        if dist.is_initialized():  # not on the one rank that tries a step in ``prepare``
            dist.all_reduce(total)
        shares = torch.where(total == 0, 0.0, weights / total)
        return [
            batch.changed(loss_factor=share / batch.weight) if batch.weight > 0 else batch
            for batch, share in zip(batches, shares, strict=True)
        ]

    def _weight(self, batch: Batch) -> Tensor:
        """Return the weight of a micro-batch, shape (), float64, on the device; 0 for a spare slot."""
        if batch.weight == 0:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return total_weight(self.task, self._only_targets(batch))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the whole forward within ``begin``; return the mean loss times ``loss_factor``, shape ()."""
        self.on_begin(batch)
        # Moved one by one: a step's micro-batches may not all fit on the device.
        with self.begin(batch):
            moved = self.to_input(batch)
            outputs = self.task.forward(model, moved)
            loss = mean_loss(self.task, outputs, moved)  # also checks the outputs
            self.training_sums.add(outputs, moved)
            self.on_end()
            self.on_loss(batch, loss)
            return _weighted(loss, batch)

    def begin(self, batch: Batch, stage: int = 0) -> AbstractContextManager[object]:
        """Seed the batch's random streams, separate for each stage; return the forward's context."""
        seed_forward(self.seed, batch.step, batch.number, self.device, stage)
        begin_forward(self.compile, self.device)
        return self.context()

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the last stage's outputs, as ``loss`` does."""
        with self.context():
            moved = self._only_targets(batch)
            loss = mean_loss(self.task, outputs, moved)
            self.training_sums.add(outputs, moved)
            self.on_loss(batch, loss)
            return _weighted(loss, batch)

    def _only_targets(self, batch: Batch) -> Batch:
        """Return the batch on the device without its inputs, its targets mixed as ``to_input`` does."""
        moved = batch.changed(inputs=None).to(self.device)
        return moved if self.mixing is None else self.mixing.only_targets(moved, batch.inputs)

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run a forward that draws no random numbers; generators are unchanged."""
        begin_forward(self.compile, self.device)
        with self.context():
            return self.task.forward(model, self.to_device(batch))

    def sums(
        self,
        model: nn.Module,
        batch: Batch,
        step: int,
        on_outputs: Callable[[Any, Batch], None] = lambda outputs, moved: None,
    ) -> dict[str, Any]:
        """Run the forward of an evaluation at ``step``; return the task's sums and records.

        ``on_outputs`` receives the outputs and the batch on the device.
        """
        with self.begin(batch.changed(step=step)):
            moved = self.to_device(batch)
            outputs = self.task.forward(model, moved)
            on_outputs(outputs, moved)
            return self.task.sums(outputs, moved)


def _weighted(loss: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss times the batch's ``loss_factor``; 0 instead of NaN if the factor is 0."""
    factor = batch.loss_factor
    if factor is None:
        return loss
    return torch.where(factor == 0, 0.0, loss) * factor.to(loss.dtype)


def make_to_input(
    config: Experiment, info: DataInfo, device: torch.device, precision: Precision
) -> Callable[[Batch], Batch]:
    """Return a function that moves a batch to ``device`` and normalizes it there."""
    normalize = Normalize(info, config.data, precision.param_dtype, channels_last=config.model.channels_last)

    def to_input(batch: Batch) -> Batch:
        moved = batch.to(device)
        return moved.changed(inputs=normalize(moved.inputs))

    return to_input


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
        return batch.changed(inputs=mix.inputs(batch.inputs), targets=self._targets(mix, batch))

    def only_targets(self, batch: Batch, inputs: Any) -> Batch:
        """Return the batch with targets mixed as by ``whole``; only the shape of ``inputs`` is read."""
        return batch.changed(targets=self._targets(self.draw(batch.step, batch.number, inputs), batch))

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
