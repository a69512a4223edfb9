"""Facts about a data set, a task or a provider of models, without importing torch: one row for each.

Validation and planning read these rows. ``built_in`` has the rows of this package; a plug-in exports its row
as an entry point with the name of its data set or task, in the groups ``hpc_train.data_facts`` and
``hpc_train.task_facts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpc_train.experiment.config.fields import NotNegativeFloat, PositiveFloat, Section
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.training_sections import DataConfig

#: The model's input.
Modality = Literal["images", "tokens", "features"]
#: The target of a sample.
Target = Literal["class", "classes", "number", "mask", "boxes", "next tokens"]


@dataclass(frozen=True)
class DataFacts:
    """The defaults describe a data set without known facts, like ``package.module:factory``."""

    modality: Modality | None = None
    target: Target | None = None
    #: The target if ``data.args.target`` is not set, for data with that key.
    default_target: Target | None = None
    #: True if ``data.root`` is required, except for the names ``rootless``.
    needs_root: bool = False
    rootless: tuple[str, ...] = ()
    #: True if ``prepare`` can download the data to ``data.root``.
    is_downloaded: bool = False
    #: True: from Hugging Face's hub.
    is_on_hub: bool = False
    #: Description of ``data.root`` for messages.
    root: str = "the folder of the data"
    #: Returns the problem if ``data.root`` lacks required folders or files.
    layout: Callable[[Path], Problem | None] = lambda root: None
    #: True if the data are the content of files in ``data.root``, so that changed files are other data.
    is_in_root: bool = False
    #: The files below ``data.root`` whose content is the data, or lists them; None: the whole root.
    listing: Callable[[DataConfig], Sequence[Path]] | None = None
    #: With ``listing``: an even sample of the file names, relative to the root, in the listing.
    listed_names: Callable[[DataConfig], Sequence[str]] | None = None
    #: Set if ``prepare`` writes an index of the files that list the samples; ``required`` if ranks need it.
    index: Literal["optional", "required"] | None = None
    #: True if ``data.cache`` can pack the files of ``data.root``.
    is_packable: bool = False
    #: A full name, if a name must continue after the slash; empty: it must not; None: either.
    example: str | None = None
    #: True if ``model_facts.known_names("datasets")`` lists the names after the slash.
    is_listed: bool = False
    #: The allowed ``data.args``; None: only the data set's code determines them.
    args: type[Section] | None = None
    #: The key of ``data.args`` that is the side of the images in pixels.
    image_size_argument: str | None = None
    #: The side of the images in pixels if neither that key nor ``data.image_size`` is set; None if it varies
    #: or only the data set's code determines it.
    image_size: Callable[[DataConfig], int | None] = lambda data: None
    #: The channels of the images; None if only the data set's code determines them.
    channels: Callable[[DataConfig], int | None] = lambda data: None
    #: The number of classes of the targets; None if only the data set's code determines it.
    num_classes: Callable[[DataConfig], int | None] = lambda data: None
    #: N of the training data; None if only the data set's code determines it.
    num_samples: Callable[[DataConfig], int | None] = lambda data: None
    #: With ``is_in_root``: the identity of the data, in parts, for a data set with a file format of its own.
    #: None: a hash of the texts or images.
    fingerprint: Callable[[DataConfig], dict[str, str]] | None = None
    #: ``module:attr`` of a built-in data set's builder. A plug-in names it by an entry point instead.
    implementation: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a provider of models. The defaults describe a plug-in's."""

    #: ``module:attr`` of the builder. A plug-in names it by an entry point instead.
    implementation: str = ""
    #: The input of all its models; None: it depends on the model.
    modality: Modality | None = None
    #: ``module:function`` that returns kind → names, for ``model_facts.known_names``: of the models by the
    #: provider's own name. Empty: its models are not listed.
    listed_by: str = ""
    #: If they are listed: a full name, and the pip package that has the names.
    example: str = ""
    package: str = ""
    #: ``module:function`` of the ``models.base.WeightsPreprocessing`` for ``data.normalize: weights``.
    preprocessing: str = ""
    #: The server of the weights that ``model.pretrained: true`` loads; None: it depends on the model.
    weights_from: Literal["hub", "torch"] | None = None
    #: True if the files of these weights are named after the model.
    names_weights: bool = True
    #: Most models take images whose sides are multiples of it, in pixels.
    stride: int = 1


@dataclass(frozen=True)
class TaskFacts:
    """A task's requirements on the data. The defaults describe a task that accepts any data."""

    #: The model's inputs; empty: any.
    modalities: tuple[Modality, ...] = ()
    targets: tuple[Target, ...] = ()
    #: The allowed ``optimization.loss``; None: only the task's code determines it.
    losses: Losses | None = field(default=None, kw_only=True)
    #: True if ``optimization.label_smoothing`` applies; None: only the task's code determines it.
    smooths_labels: bool | None = field(default=None, kw_only=True)
    #: True if the loss accepts targets mixed by ``optimization.mixup``; None: the task's code determines it.
    mixes_targets: bool | None = field(default=None, kw_only=True)
    #: The metrics that ``val`` rows may have, without the prefix ``ema_``; ``iou_*`` stands for several.
    #: Empty: only the task's code determines them.
    metrics: tuple[str, ...] = field(default=(), kw_only=True)
    #: Target → the subset of ``metrics`` that exists only with it.
    target_metrics: Mapping[Target, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    #: The suffixes of the files to which ``predict`` can write predictions; empty: none.
    #: None: only the task's code determines it.
    prediction_formats: tuple[str, ...] | None = field(default=None, kw_only=True)
    #: ``module:attr`` of a built-in task's class. A plug-in names it by an entry point instead.
    implementation: str = ""
    #: True if the model takes the targets and returns its own losses, so that it can't be cut into stages and
    #: its inputs can't be cast.
    needs_whole_model: bool = False

    def metrics_with(self, target: Target | None) -> list[str]:
        """Return the metrics that ``val`` rows may have with this target; None: an unknown target."""
        others = [] if target is None else [key for key in self.target_metrics if key != target]
        absent = {name for key in others for name in self.target_metrics[key]}
        return [name for name in self.metrics if name not in absent]

    def fits(self, data: DataFacts) -> bool:
        """Return True if the data have what the task needs, as far as the facts are known."""
        reads = data.modality is None or not self.modalities or data.modality in self.modalities
        return reads and (data.target is None or not self.targets or data.target in self.targets)


def _not_all_zero(values: list[float]) -> list[float]:
    if not any(values):
        raise ValueError("are all 0, so nothing is learned; write a number above 0 for some classes")
    return values


ClassValues = Annotated[list[NotNegativeFloat], Field(min_length=1), AfterValidator(_not_all_zero)]


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
CLASSIFICATION_LOSSES: Losses = {"cross_entropy": CrossEntropyArgs, "bce": BceArgs, "focal": FocalArgs}
REGRESSION_LOSSES: Losses = {"mse": NoArgs, "mae": NoArgs, "huber": HuberArgs}
CAUSAL_LM_LOSSES: Losses = {"cross_entropy": NoArgs}
SEGMENTATION_LOSSES: Losses = {"cross_entropy": CrossEntropyArgs, "dice": DiceArgs, "ohem": OhemArgs}
