# ruff: noqa: N806  (shape suffixes)
"""The losses of ``classification``, and how a loss is created from its name.

Legend: B samples, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.training_sections import LossConfig
from hpc_train.experiment.data_facts.facts import CLASSIFICATION_LOSSES, BceArgs, CrossEntropyArgs, FocalArgs
from hpc_train.training.tasks.base import divided


class ClassLoss(ABC):
    """A loss of logits (B, C) and targets: classes (B,) int64 or shares of the classes (B, C) float."""

    @abstractmethod
    def __call__(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each sample, (B,). ``smoothing``: the share that is spread over all classes."""

    @property
    def weighs_samples(self) -> bool:
        """True if ``weights`` returns weights for class numbers."""
        return False

    def weights(self, targets: Tensor) -> Tensor | None:
        """Return the weight of each sample in the mean, (B,) float64; None if all weights are equal."""
        return None

    def mean(self, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the weighted mean over the samples, ()."""
        losses_B, weights_B = self(logits, targets, smoothing), self.weights(targets)
        return losses_B.mean() if weights_B is None else divided(losses_B.sum(), weights_B.sum())


@dataclass(frozen=True)
class CrossEntropy(ClassLoss):
    """Cross entropy with label smoothing (arXiv:1512.00567, section 7), as torch computes it."""

    args: CrossEntropyArgs

    def __call__(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each sample, (B,), multiplied by the class weights if there are any."""
        losses_B, weights_B = self._reduced(logits, targets, smoothing, "none"), self.weights(targets)
        # With label smoothing torch's loss of a sample with weight 0 is not 0.
        return losses_B if weights_B is None else torch.where(weights_B > 0, losses_B, 0.0)

    @property
    def weighs_samples(self) -> bool:
        """True if there are ``class_weights``."""
        return self.args.class_weights is not None

    def weights(self, targets: Tensor) -> Tensor | None:
        """Return the weight of each sample's class; torch's mean divides by the sum of these, too.

        None for shares of the classes: there torch divides by the number of samples.
        """
        if self.args.class_weights is None or targets.is_floating_point():
            return None
        return class_values(self.args.class_weights, targets)

    def mean(self, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return torch's mean; 0, not NaN, if all samples have weight 0."""
        if self.args.class_weights is not None:
            return super().mean(logits, targets, smoothing)
        return self._reduced(logits, targets, smoothing, "mean")

    def _reduced(self, logits: Tensor, targets: Tensor, smoothing: float, reduction: str) -> Tensor:
        return functional.cross_entropy(
            logits,
            targets.to(logits.dtype) if targets.is_floating_point() else targets,
            weight=_like(self.args.class_weights, logits),
            label_smoothing=smoothing,
            reduction=reduction,
        )


@dataclass(frozen=True)
class BinaryCrossEntropy(ClassLoss):
    """One binary decision per class, averaged over the classes. With one class per sample: timm's."""

    args: BceArgs
    has_several: bool

    def __call__(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each sample, (B,): the mean over its classes."""
        return functional.binary_cross_entropy_with_logits(
            logits,
            smoothed(
                as_shares(targets, logits.shape[1], logits.dtype), smoothing, has_several=self.has_several
            ),
            weight=_like(self.args.class_weights, logits),
            pos_weight=_like(self.args.pos_weight, logits),
            reduction="none",
        ).mean(dim=1)


@dataclass(frozen=True)
class Focal(ClassLoss):
    """Focal loss of the softmax over the classes or, with several labels per sample, of each sigmoid."""

    args: FocalArgs
    has_several: bool

    def __call__(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each sample, (B,): the sum over the classes; with several labels the mean."""
        targets_BC = smoothed(
            as_shares(targets, logits.shape[1], logits.dtype), smoothing, has_several=self.has_several
        )
        return self._sigmoid(logits, targets_BC) if self.has_several else self._softmax(logits, targets_BC)

    def _softmax(self, logits: Tensor, targets: Tensor) -> Tensor:
        logs_BC = logits.log_softmax(dim=1)
        return -(targets * _missing(logs_BC.exp()) ** self.args.gamma * logs_BC * self._weights(logits)).sum(
            1
        )

    def _sigmoid(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses_BC = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        chances_BC = logits.sigmoid()
        right_BC = chances_BC * targets + (1 - chances_BC) * (1 - targets)
        return (losses_BC * _missing(right_BC) ** self.args.gamma * self._weights(logits)).mean(dim=1)

    def _weights(self, logits: Tensor) -> Tensor | float:
        weights = _like(self.args.class_weights, logits)
        return 1.0 if weights is None else weights


def _missing(chances: Tensor) -> Tensor:
    """Return 1 - p, bounded from below: the derivative of its powers below 1 is infinite at 0."""
    return (1 - chances).clamp(min=torch.finfo(chances.dtype).tiny)


def as_shares(targets: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return targets as shares of the classes, (B, C)."""
    if targets.dim() == 1:
        targets = functional.one_hot(targets, num_classes)
    return targets.to(dtype)


def smoothed(targets: Tensor, smoothing: float, *, has_several: bool) -> Tensor:
    """Spread a share of the targets (B, C) over all classes, or over yes and no if ``has_several``."""
    if smoothing == 0:
        return targets
    return targets * (1 - smoothing) + smoothing / (2 if has_several else targets.shape[1])


def make_class_loss(config: LossConfig | None, num_classes: int, *, has_several: bool) -> ClassLoss:
    """Return the experiment's loss. ``has_several``: each class of a sample is a separate binary decision.

    Raises BadFileError if the arguments do not fit this number of classes.
    """
    config = config or LossConfig(name="bce" if has_several else "cross_entropy")
    args = CLASSIFICATION_LOSSES[config.name].model_validate(config.args)
    check_weights(args, num_classes)
    match args:
        case BceArgs():
            return BinaryCrossEntropy(args, has_several)
        case FocalArgs():
            return Focal(args, has_several)
        case CrossEntropyArgs():
            return CrossEntropy(args)
    raise AssertionError(f"{config.name} has no implementation")


def check_weights(args: Section, num_classes: int) -> None:
    """Raise BadFileError if the number of a loss's weights differs from the number of classes."""
    for name in ("class_weights", "pos_weight"):
        values = getattr(args, name, None)
        if values is not None and len(values) != num_classes:
            raise BadFileError(
                f"optimization.loss.args.{name}: has {len(values)} values, and the data have {num_classes} "
                "classes; write one per class"
            )


def class_values(values: list[float], classes: Tensor) -> Tensor:
    """Return the value of each class number, float64, in the shape of ``classes``."""
    return torch.tensor(values, dtype=torch.float64, device=classes.device)[classes]


def _like(values: list[float] | None, logits: Tensor) -> Tensor | None:
    return None if values is None else logits.new_tensor(values)
