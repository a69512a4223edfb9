# ruff: noqa: N806  (shape suffixes)
"""The losses of ``segmentation``, and how one is made of its name.

Legend: P pixels of a micro-batch, (P,) or as images (B, H, W); C classes, the second dimension of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.config.training_sections import LossConfig
from hpc_train.data_facts.losses import SEGMENTATION, CrossEntropyArgs, DiceArgs, OhemArgs
from hpc_train.tasks.class_losses import check_weights

#: Logits (P, C) or (B, C, H, W), classes int64 and labelled bool (P,) or (B, H, W) → the mean over the
#: labelled pixels, ().
PixelLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_pixel_loss(config: LossConfig | None, num_classes: int, smoothing: float) -> PixelLoss:
    """Return the loss of the file, 0 where no pixel is labelled.

    Raises BadFileError where the arguments are not for this number of classes.
    """
    config = config or LossConfig(name="cross_entropy")
    args = SEGMENTATION[config.name].model_validate(config.args)
    match args:
        case DiceArgs():
            return partial(_dice, args, smoothing)
        case OhemArgs():
            return partial(_ohem, args, smoothing)
        case CrossEntropyArgs():
            check_weights(args, num_classes)
            return partial(_cross_entropy, args, smoothing)
    raise AssertionError(f"{config.name} has no implementation")


def pixel_losses(
    logits: Tensor,
    classes: Tensor,
    labelled: Tensor,
    smoothing: float = 0.0,
    weights: list[float] | None = None,
) -> Tensor:
    """Return the cross entropy of each pixel, 0 of those that are not labelled."""
    losses_P = functional.cross_entropy(
        logits,
        torch.where(labelled, classes, 0),
        weight=None if weights is None else logits.new_tensor(weights),
        label_smoothing=smoothing,
        reduction="none",
    )
    # No product with ``labelled``: what a filled-up sample gives may be nan.
    return torch.where(labelled, losses_P, torch.zeros_like(losses_P))


def flat(logits: Tensor, classes: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (P, C), classes (P,) and labelled (P,)."""
    return logits.movedim(1, -1).flatten(0, -2), classes.flatten(), labelled.flatten()


def _cross_entropy(
    args: CrossEntropyArgs, smoothing: float, logits: Tensor, classes: Tensor, labelled: Tensor
) -> Tensor:
    losses_P = pixel_losses(logits, classes, labelled, smoothing, args.class_weights)
    return losses_P.sum() / labelled.sum().clamp(min=1)


def _dice(args: DiceArgs, smoothing: float, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
    """Return 1 - the mean Dice coefficient of the classes that occur (arXiv:1606.04797, with |p| + |t|)."""
    logits, classes, labelled = flat(logits, classes, labelled)
    truth_PC = functional.one_hot(torch.where(labelled, classes, 0), logits.shape[1]) * labelled[:, None]
    chances_PC = logits.softmax(dim=1) * labelled[:, None]
    both_C = (chances_PC * truth_PC).sum(0)
    sizes_C = chances_PC.sum(0) + truth_PC.sum(0)
    occurs_C = truth_PC.sum(0) > 0
    missing_C = (1 - (2 * both_C + args.smooth) / (sizes_C + args.smooth).clamp(min=1e-12)) * occurs_C
    loss = missing_C.sum() / occurs_C.sum().clamp(min=1)
    if args.cross_entropy == 0:
        return loss
    return loss + args.cross_entropy * _cross_entropy(
        CrossEntropyArgs(), smoothing, logits, classes, labelled
    )


def _ohem(args: OhemArgs, smoothing: float, logits: Tensor, classes: Tensor, labelled: Tensor) -> Tensor:
    """Return the mean cross entropy of the hard pixels: those with p below the threshold, or the hardest."""
    losses_P = pixel_losses(logits, classes, labelled, smoothing).flatten()
    labelled = labelled.flatten()
    hardest_P = losses_P.detach().sort(descending=True).values
    fewest = (args.min_kept * labelled.sum()).ceil().to(torch.int64).clamp(min=1)
    bound = hardest_P.gather(0, fewest[None] - 1)[0].clamp(max=-math.log(args.threshold))
    hard_P = (losses_P.detach() >= bound) & labelled
    return (losses_P * hard_P).sum() / hard_P.sum().clamp(min=1)
