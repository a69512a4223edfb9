"""The losses of ``optimization.loss``: the losses of each task, and the arguments of each loss.

No torch: validation reads these sections before ranks start. ``TaskFacts.losses`` refers to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from hpc_train.config.fields import NotNegativeFloat, PositiveFloat, Section

ClassValues = Annotated[list[NotNegativeFloat], Field(min_length=1)]


class NoArgs(Section):
    """A loss without arguments."""


class CrossEntropyArgs(Section):
    """Cross entropy over the classes."""

    class_weights: ClassValues | None = None
    """A weight per class, by whose sum over the targets of the step the loss is divided. Default: 1."""


class BceArgs(Section):
    """Binary cross entropy of each class, averaged over the classes."""

    class_weights: ClassValues | None = None
    """A factor per class. Default: 1."""
    pos_weight: ClassValues | None = None
    """A factor per class of the samples that have it, as in torch's BCEWithLogitsLoss. Default: 1."""


class FocalArgs(Section):
    """Focal loss (arXiv:1708.02002): cross entropy times (1 - p)^gamma, p the true class's probability."""

    gamma: NotNegativeFloat = 2.0
    """The exponent; 0: cross entropy."""
    class_weights: ClassValues | None = None
    """A factor per class. Default: 1."""


class HuberArgs(Section):
    """Huber loss: quadratic for small errors, linear for large ones."""

    delta: PositiveFloat = 1.0
    """The error from which the loss is linear."""


class DiceArgs(Section):
    """1 - the Dice coefficient of an image, averaged over the classes that occur in it."""

    smooth: NotNegativeFloat = 1.0
    """Added to numerator and denominator, in pixels."""
    cross_entropy: NotNegativeFloat = 0.0
    """The factor of the cross entropy that is added. 0: none."""


class OhemArgs(Section):
    """Cross entropy of the hard pixels of an image alone (online hard example mining)."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """A pixel is hard if the probability of its class is below this."""
    min_kept: Annotated[float, Field(gt=0, le=1)] = 0.0625
    """Minimum share of an image's labelled pixels that counts as hard, the hardest ones."""


#: Name of a loss → its arguments. The first one is the default.
Losses = Mapping[str, type[Section]]
CLASSIFICATION: Losses = {"cross_entropy": CrossEntropyArgs, "bce": BceArgs, "focal": FocalArgs}
REGRESSION: Losses = {"mse": NoArgs, "mae": NoArgs, "huber": HuberArgs}
CAUSAL_LM: Losses = {"cross_entropy": NoArgs}
SEGMENTATION: Losses = {"cross_entropy": CrossEntropyArgs, "dice": DiceArgs, "ohem": OhemArgs}
