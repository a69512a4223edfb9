"""What has to be known of a data set or a task without importing torch: one row for each.

Validation and planning read these rows. ``built_in`` has those of the data sets and tasks in this package; a
plug-in exports a row of its own as the entry point of its data set's or task's name, in the groups
``hpc_train.data_facts`` and ``hpc_train.task_facts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpc_train.config.fields import Section
from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.losses import Losses

#: What the model reads of a sample.
Modality = Literal["images", "tokens", "features"]
#: What the target of a sample is.
Target = Literal["class", "classes", "number", "mask", "boxes", "next tokens"]


@dataclass(frozen=True)
class DataFacts:
    """The defaults describe a data set of which nothing is known, like ``package.module:factory``."""

    modality: Modality | None = None
    target: Target | None = None
    #: The target where ``data.args.target`` does not say another, for data with that key.
    default_target: Target | None = None
    #: Whether ``data.root`` must be given, except for the names ``rootless``.
    needs_root: bool = False
    rootless: tuple[str, ...] = ()
    #: Whether ``prepare`` can download the data to ``data.root``.
    is_downloaded: bool = False
    #: What ``data.root`` is, in words.
    root: str = "the folder of the data"
    #: What ``data.root`` lacks of the folders and files that it must contain.
    layout: Callable[[Path], Problem | None] = lambda root: None
    #: Whether the data are what the files of ``data.root`` hold, so that changed files are other data.
    is_in_root: bool = False
    #: The files below ``data.root`` whose content is the data, or lists them, where it is not all of the
    #: root.
    listing: Callable[[DataConfig], Sequence[Path]] | None = None
    #: With ``listing``: an even sample of the names of the files, below the root, that the listing names.
    listed_names: Callable[[DataConfig], Sequence[str]] | None = None
    #: Whether ``prepare`` writes an index of the files that list the samples, and whether ranks need it.
    index: Literal["optional", "required"] | None = None
    #: Whether ``data.cache`` can pack the files of ``data.root``.
    is_packable: bool = False
    #: A full name, where a name must continue after the slash; empty: it must not; None: either.
    example: str | None = None
    #: Whether ``model_facts.known_names("datasets")`` lists what may follow the slash.
    is_listed: bool = False
    #: What ``data.args`` may contain; None: only the data set's own code knows it.
    args: type[Section] | None = None
    #: The key of ``data.args`` that is the side of the images in pixels.
    image_size_argument: str | None = None
    #: The side of the images in pixels where neither that key nor ``data.image_size`` is given; None where
    #: it varies or only the data set's own code knows it.
    image_size: Callable[[DataConfig], int | None] = lambda data: None
    #: The channels of the images; None where only the data set's own code knows them.
    channels: Callable[[DataConfig], int | None] = lambda data: None
    #: N of the training data; None where only the data set's own code knows it.
    num_samples: Callable[[DataConfig], int | None] = lambda data: None
    #: With ``is_in_root``: what identifies the data, in parts, for one with files of its own. None: a hash of
    #: the texts or images.
    fingerprint: Callable[[DataConfig], dict[str, str]] | None = None
    #: ``module:attr`` of a built-in data set's builder. A plug-in names it by an entry point instead.
    implementation: str = ""


@dataclass(frozen=True)
class TaskFacts:
    """What a task needs of the data. The defaults describe a task that takes any."""

    #: What it reads; empty: anything.
    modalities: tuple[Modality, ...] = ()
    targets: tuple[Target, ...] = ()
    #: What ``optimization.loss`` may be; None: only the task's own code knows it.
    losses: Losses | None = field(default=None, kw_only=True)
    #: Whether ``optimization.label_smoothing`` applies; None: only the task's own code knows it.
    smooths_labels: bool | None = field(default=None, kw_only=True)
    #: Whether the loss takes targets that ``optimization.mixup`` mixes; None: only its own code knows it.
    mixes_targets: bool | None = field(default=None, kw_only=True)
    #: The metrics that ``val`` rows may have, without the prefix ``ema_``; ``iou_*`` stands for several.
    #: Empty: only the task's own code knows them.
    metrics: tuple[str, ...] = field(default=(), kw_only=True)
    #: Target → those of ``metrics`` that exist only with it.
    target_metrics: Mapping[Target, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    #: The suffixes of the files to which ``predict`` can write its predictions; empty: it can't predict.
    #: None: only the task's own code knows it.
    prediction_formats: tuple[str, ...] | None = field(default=None, kw_only=True)
    #: ``module:attr`` of a built-in task's class. A plug-in names it by an entry point instead.
    implementation: str = ""
    #: Whether the model takes the targets and returns its own losses, so that it can't be cut into stages and
    #: its inputs can't be cast.
    needs_whole_model: bool = False

    def metrics_with(self, target: Target | None) -> list[str]:
        """Return the metrics that ``val`` rows may have with this target; None: it is unknown."""
        others = [] if target is None else [key for key in self.target_metrics if key != target]
        absent = {name for key in others for name in self.target_metrics[key]}
        return [name for name in self.metrics if name not in absent]

    def fits(self, data: DataFacts) -> bool:
        """Tell whether the data have what the task needs, as far as is known."""
        reads = data.modality is None or not self.modalities or data.modality in self.modalities
        return reads and (data.target is None or not self.targets or data.target in self.targets)
