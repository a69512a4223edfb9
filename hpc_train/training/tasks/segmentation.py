# ruff: noqa: N806  (shape suffixes)
"""``task: segmentation``: one class per pixel, and its losses.

Legend: B samples, C classes, H rows, W columns, P pixels of an image.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import LossConfig
from hpc_train.experiment.data_facts.facts import SEGMENTATION_LOSSES, CrossEntropyArgs, DiceArgs, OhemArgs
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.training.tasks import class_losses, drawing
from hpc_train.training.tasks.base import Task, checked_logits, class_table, divided

#: The label of pixels without a class, if the data set defines none.
_IGNORED = 255
#: The weight of the auxiliary output's loss (PSPNet, arXiv:1612.01105).
_AUXILIARY = 0.4
#: Device types that compute the cross entropy of (B, C, H, W); others compute it of flat pixels.
_COMPUTE_IMAGES = ("cpu",)


class Segmentation(Task):
    """Logits (B, C, H, W) against masks (B, H, W) of class numbers.

    A model may return a dict like torchvision's models: the logits as ``out`` and, in training, the logits of
    an auxiliary head as ``aux``. Logits of another size are resized to that of the mask.
    """

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        self._num_classes: int = experiment.model.args.get("num_classes", info.num_classes)
        # Such as traffic_light; numbers if two names would be the same.
        names = [re.sub(r"\W+", "_", name.lower()).strip("_") for name in info.class_names]
        is_usable = len(names) == self._num_classes == len({*names} - {""})
        self._class_names = names if is_usable else [str(number) for number in range(self._num_classes)]
        self.optional_metrics = [f"iou_{name}" for name in self._class_names]
        self._ignored = _IGNORED if info.ignore_index is None else info.ignore_index
        config = experiment.optimization
        self._pixel_loss = make_pixel_loss(config.loss, self._num_classes, config.label_smoothing)
        self.target_spec = TargetSpec(
            "a mask with a class number per pixel",
            kind="integer",
            shape=(None, None),
            minimum=0,
            maximum=self._num_classes - 1,
            geometry="mask",
            ignored=self._ignored,
        )

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean over the labelled pixels of the micro-batch, or over its images, as the loss
        defines it; 0 if no pixel is labelled.
        """
        out, *auxiliary = self._logits(outputs)
        loss = self._mean_loss(out, batch.targets)
        for logits in auxiliary:
            loss = loss + _AUXILIARY * self._mean_loss(logits, batch.targets)
        return loss

    def weight(self, batch: Batch) -> Tensor:
        """Return the divisor of the loss's mean.

        The number of labelled pixels, the sum of their class weights, or the number of images with labelled
        pixels, as the loss defines it.
        """
        return self._pixel_loss.weight(*self._classes(batch.targets))

    def _classes(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class numbers as int64, and a mask of the labelled pixels."""
        return masks.to(torch.int64), masks != self._ignored

    def _logits(self, outputs: Any) -> list[Tensor]:
        """Return the logits and, if there is an auxiliary head, its logits."""
        logits = [outputs]
        if isinstance(outputs, dict):
            logits = [outputs[name] for name in ("out", "aux") if name in outputs]
        return [checked_logits(values, "B, C, H, W", self._num_classes) for values in logits or [outputs]]

    def _mean_loss(self, logits: Tensor, masks: Tensor) -> Tensor:
        return self._pixel_loss(_resized(logits, masks), *self._classes(masks))

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return ``count`` (of labelled pixels), the sum ``loss`` of their cross entropy without smoothing,
        and ``confusion``, (C, C) int64: pixels by class and prediction.

        C is the model's number of channels, which may be more than the data's number of classes.
        """
        out, *_ = self._logits(outputs)
        logits, (classes, labelled) = _resized(out, batch.targets), self._classes(batch.targets)
        labelled = labelled & batch.valid[:, None, None]
        losses = pixel_losses(logits, classes, labelled)
        channels = logits.shape[1]
        cells = channels * channels
        # Ignored pixels are counted in an additional cell at the end.
        cells_P = torch.where(labelled, classes * channels + logits.argmax(dim=1), cells).flatten()
        counts = torch.bincount(cells_P, minlength=cells + 1)  # (class, prediction) → pixels
        return {
            "count": labelled.sum(dtype=torch.float64),
            "loss": losses.sum(dtype=torch.float64),
            "confusion": counts[:cells].view(channels, channels),
        }

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return ``loss``, ``accuracy`` of the pixels, ``miou``, and ``iou_<class>`` of each class that
        occurs in the masks or the predictions; ``miou`` is the mean of these.
        """
        count = max(sums["count"], 1.0)
        confusion = sums["confusion"].double()
        hits_C = confusion.diagonal()
        union_C = confusion.sum(0) + confusion.sum(1) - hits_C
        occurs_C = union_C > 0
        ious_C = hits_C / union_C.clamp(min=1)
        metrics = {
            "loss": sums["loss"] / count,
            "accuracy": float(hits_C.sum()) / count,
            "miou": float(ious_C[occurs_C].mean()) if bool(occurs_C.any()) else 0.0,
        }
        named = zip(self._names(len(ious_C)), ious_C.tolist(), occurs_C.tolist(), strict=True)
        return metrics | {f"iou_{name}": iou for name, iou, occurs in named if occurs}

    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        """Return the confusion matrix as a CSV table: a row per class, a column per prediction."""
        names = self._names(len(sums["confusion"]))
        return {"confusion.csv": class_table(names, names, sums["confusion"])}

    def _names(self, channels: int) -> list[str]:
        """Return the name of each channel: a number if the data have no such class."""
        return self._class_names + [str(number) for number in range(self._num_classes, channels)]

    def picture(self, outputs: Any, batch: Batch, place: int, image: Image.Image) -> Image.Image:
        """Return image, mask and prediction side by side, above the names of their classes.

        Pixels without a class are dark gray in both.
        """
        out, *_ = self._logits(outputs)
        mask_HW = batch.targets[place]
        logits = _resized(out[place : place + 1], mask_HW[None])
        truth_HW = mask_HW.to(torch.int64).cpu().numpy()
        predicted_HW = logits.argmax(dim=1)[0].cpu().numpy()
        ignored_HW = truth_HW == self._ignored
        image = image.resize(truth_HW.shape[::-1])
        shown = drawing.panels(
            [
                ("image", image),
                ("ground truth", drawing.with_classes(image, truth_HW, ignored_HW)),
                ("prediction", drawing.with_classes(image, predicted_HW, ignored_HW)),
            ]
        )
        numbers = sorted({*truth_HW[~ignored_HW].tolist(), *predicted_HW[~ignored_HW].tolist()})
        names = self._names(out.shape[1])
        entries = [(drawing.short(names[number]), drawing.color_of(number)) for number in numbers]
        error = float((truth_HW != predicted_HW)[~ignored_HW].mean()) if numbers else 0.0
        return drawing.described(
            drawing.with_legend(shown, entries),
            classes=[name for name, _ in entries],
            error=error,
            lines=[f"{error:.1%} of the pixels wrong"],
        )


def _resized(logits: Tensor, masks: Tensor) -> Tensor:
    """Return logits (B, C, H, W) in the size of the masks."""
    if logits.shape[-2:] == masks.shape[-2:]:
        return logits
    return functional.interpolate(logits, size=masks.shape[-2:], mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class PixelLoss(ABC):
    """A loss of logits (B, C, H, W), class numbers (B, H, W) int64 and labelled (B, H, W) bool."""

    smoothing: float

    def __call__(self, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
        """Return the mean over the loss's weight, (); 0 if no pixel is labelled."""
        return divided(self.total(logits, classes, labelled), self.weight(classes, labelled))

    def weight(self, classes: Tensor, labelled: Tensor) -> Tensor:
        """Return the divisor of the mean, (), float64: the number of images with a labelled pixel."""
        return labelled.flatten(1).any(dim=1).sum(dtype=torch.float64)

    @abstractmethod
    def total(self, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
        """Return the dividend, (): the sum over the images of a loss that is 0 without labelled pixels."""


@dataclass(frozen=True)
class _CrossEntropy(PixelLoss):
    """The sum over the labelled pixels of the step, divided by their number or the sum of class weights."""

    args: CrossEntropyArgs

    def weight(self, classes: Tensor, labelled: Tensor) -> Tensor:
        if self.args.class_weights is None:
            return labelled.sum(dtype=torch.float64)
        return self._weights(classes, labelled).sum()

    def total(self, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
        weights = self.args.class_weights
        if weights is not None:  # with label smoothing the loss of a class with weight 0 would not be 0
            labelled = self._weights(classes, labelled) > 0
        return pixel_losses(logits, classes, labelled, self.smoothing, weights).sum()

    def _weights(self, classes: Tensor, labelled: Tensor) -> Tensor:
        assert self.args.class_weights is not None
        weights = class_losses.class_values(self.args.class_weights, torch.where(labelled, classes, 0))
        return torch.where(labelled, weights, 0.0)


@dataclass(frozen=True)
class _Dice(PixelLoss):
    """1 - the mean Dice coefficient of an image's classes that occur (arXiv:1606.04797, with |p| + |t|)."""

    args: DiceArgs

    def total(self, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
        labelled_BP1 = labelled.flatten(1)[..., None]
        truth_BPC = functional.one_hot(torch.where(labelled, classes, 0).flatten(1), logits.shape[1])
        truth_BPC = truth_BPC * labelled_BP1
        chances_BPC = logits.softmax(dim=1).flatten(2).transpose(1, 2) * labelled_BP1
        both_BC = (chances_BPC * truth_BPC).sum(1)
        sizes_BC = chances_BPC.sum(1) + truth_BPC.sum(1)
        occurs_BC = truth_BPC.sum(1) > 0
        smooth = self.args.smooth
        missing_BC = (1 - (2 * both_BC + smooth) / (sizes_BC + smooth).clamp(min=1e-12)) * occurs_BC
        losses_B = divided(missing_BC.sum(1), occurs_BC.sum(1))
        if self.args.cross_entropy > 0:
            losses_BP = pixel_losses(logits, classes, labelled, self.smoothing).flatten(1)
            losses_B = losses_B + self.args.cross_entropy * divided(
                losses_BP.sum(1), labelled_BP1.sum((1, 2))
            )
        return losses_B.sum()


@dataclass(frozen=True)
class _Ohem(PixelLoss):
    """The mean cross entropy of an image's hard pixels: those with p below the threshold, or the hardest."""

    args: OhemArgs

    def total(self, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
        losses_BP = pixel_losses(logits, classes, labelled, self.smoothing).flatten(1)
        labelled_BP = labelled.flatten(1)
        hardest_BP = losses_BP.detach().sort(dim=1, descending=True).values
        fewest_B = (self.args.min_kept * labelled_BP.sum(1)).ceil().to(torch.int64).clamp(min=1)
        bounds_B1 = hardest_BP.gather(1, fewest_B[:, None] - 1).clamp(max=-math.log(self.args.threshold))
        hard_BP = (losses_BP.detach() >= bounds_B1) & labelled_BP
        return divided((losses_BP * hard_BP).sum(1), hard_BP.sum(1)).sum()


def make_pixel_loss(config: LossConfig | None, num_classes: int, smoothing: float) -> PixelLoss:
    """Return the experiment's loss.

    Raises BadFileError if the arguments do not fit this number of classes.
    """
    config = config or LossConfig(name="cross_entropy")
    args = SEGMENTATION_LOSSES[config.name].model_validate(config.args)
    match args:
        case DiceArgs():
            return _Dice(smoothing, args)
        case OhemArgs():
            return _Ohem(smoothing, args)
        case CrossEntropyArgs():
            class_losses.check_weights(args, num_classes)
            return _CrossEntropy(smoothing, args)
    raise AssertionError(f"{config.name} has no implementation")


def pixel_losses(
    logits: Tensor,
    classes: Tensor,
    labelled: Tensor,
    smoothing: float = 0.0,
    weights: list[float] | None = None,
) -> Tensor:
    """Return the cross entropy of each pixel, (B, H, W), and 0 for unlabelled pixels.

    The CPU computes it from (B, C, H, W), in a quarter of the time of flat pixels (measured). CUDA's cross
    entropy over (B, C, H, W) has no deterministic implementation, so elsewhere pixels are flattened.
    """
    targets = torch.where(labelled, classes, 0)
    if logits.device.type not in _COMPUTE_IMAGES:
        logits, targets = logits.movedim(1, -1).flatten(0, -2), targets.flatten()
    losses = functional.cross_entropy(
        logits,
        targets,
        weight=None if weights is None else logits.new_tensor(weights),
        label_smoothing=smoothing,
        reduction="none",
    ).view(classes.shape)
    # No product with ``labelled``: the loss of a padding sample may be NaN.
    return torch.where(labelled, losses, torch.zeros_like(losses))
