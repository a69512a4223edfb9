"""What has to be known of a data set or a task without importing torch: one row for each.

Validation and planning read these rows; none of them names a data set. A plug-in exports a row of its own as
the entry point of its data set's or task's name, in the groups ``hpc_train.data_facts`` and
``hpc_train.task_facts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from hpc_train.config.fields import Section
from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts import image_args, losses, root_layout, torchvision_sizes
from hpc_train.data_facts.data_size import (
    TextArgs,
    count_annotated_images,
    count_images,
    count_masked_images,
    count_sequences,
)
from hpc_train.data_facts.listed_data import (
    HuggingFaceArgs,
    ImageListArgs,
    WebdatasetArgs,
    arrow_files,
    count_listed,
    count_shards,
    has_index,
    image_list_files,
    webdataset_files,
    without_index,
)
from hpc_train.data_facts.losses import Losses
from hpc_train.data_facts.token_shards import TokensArgs, count_token_sequences, tokens_fingerprint
from hpc_train.errors import BadFileError, shortened
from hpc_train.paths import expanded
from hpc_train.registry import described, is_factory, load_traits, split_name

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


#: scikit-learn's 1,797 digits without every fifth, which is validation.
_DIGITS = 1438
#: What ``synthetic`` makes where ``data.args`` does not say it.
_SYNTHETIC_DEFAULT = 1024
#: The side of the images of ``digits``, and of ``synthetic`` where ``data.args`` does not say it.
_DIGITS_SIZE = _SYNTHETIC_SIZE = 32


def _argument(name: str, default: int) -> Callable[[DataConfig], int | None]:
    """Return what reads a number from ``data.args``; None where it is none, which the data set refuses."""

    def read(data: DataConfig) -> int | None:
        given = data.args.get(name, default)
        return given if type(given) is int and given > 0 else None

    return read


def _synthetic_samples(data: DataConfig) -> int | None:
    given = data.args.get("num_samples", _SYNTHETIC_DEFAULT)
    return given if type(given) is int else None


def _image_folder_samples(data: DataConfig) -> int | None:
    return count_images(expanded(data.root) / "train") if data.root else None


#: The built-in data sets, one row each.
DATA_SETS = {
    "digits": DataFacts(
        "images",
        "class",
        example="",
        image_size=lambda data: _DIGITS_SIZE,
        channels=_argument("channels", 1),
        num_samples=lambda data: _DIGITS,
        args=image_args.DigitsArgs,
        implementation="hpc_train.datasets.sources.digits:build",
    ),
    "synthetic": DataFacts(
        "images",
        "class",
        example="",
        image_size_argument="image_size",
        image_size=lambda data: _SYNTHETIC_SIZE,
        channels=_argument("channels", 3),
        num_samples=_synthetic_samples,
        args=image_args.SyntheticArgs,
        implementation="hpc_train.datasets.sources.synthetic:build",
    ),
    "imagefolder": DataFacts(
        "images",
        "class",
        needs_root=True,
        root="the folder that contains train/<class>/ and val/<class>/",
        layout=root_layout.image_folder,
        is_in_root=True,
        is_packable=True,
        example="",
        channels=_argument("channels", 3),
        num_samples=_image_folder_samples,
        args=image_args.ImageFolderArgs,
        implementation="hpc_train.datasets.sources.imagefolder:build",
    ),
    "image_list": DataFacts(
        "images",
        default_target="class",
        needs_root=True,
        root="the folder of the lists and images",
        is_in_root=True,
        listing=image_list_files,
        index="optional",
        example="",
        channels=_argument("channels", 3),
        num_samples=count_listed,
        args=ImageListArgs,
        implementation="hpc_train.datasets.sources.image_list:build",
    ),
    "webdataset": DataFacts(
        "images",
        default_target="class",
        needs_root=True,
        root="the folder of the tar files",
        is_in_root=True,
        listing=webdataset_files,
        index="required",
        example="",
        channels=_argument("channels", 3),
        num_samples=count_shards,
        args=WebdatasetArgs,
        implementation="hpc_train.datasets.sources.webdataset:build",
    ),
    "segmentation_folder": DataFacts(
        "images",
        "mask",
        needs_root=True,
        root="the folder that contains train/images/ and train/masks/",
        layout=root_layout.segmentation_folder,
        is_in_root=True,
        example="",
        channels=_argument("channels", 3),
        num_samples=lambda data: count_masked_images(expanded(data.root)) if data.root else None,
        args=image_args.SegmentationFolderArgs,
        implementation="hpc_train.datasets.sources.segmentation_folder:build",
    ),
    "huggingface": DataFacts(
        "images",
        needs_root=True,
        is_downloaded=True,
        root="the folder of a data set saved by save_to_disk, or to which prepare saves it",
        is_in_root=True,
        listing=arrow_files,
        channels=_argument("channels", 3),
        args=HuggingFaceArgs,
        implementation="hpc_train.datasets.sources.huggingface:build",
    ),
    "torchvision": DataFacts(
        "images",
        needs_root=True,
        is_downloaded=True,
        rootless=("torchvision/FakeData",),
        root="the folder of torchvision's files, for example data/cifar10",
        example="torchvision/CIFAR10",
        is_listed=True,
        image_size=torchvision_sizes.size,
        channels=torchvision_sizes.channels,
        num_samples=torchvision_sizes.samples,
        implementation="hpc_train.datasets.sources.torchvision:build",
    ),
    "coco": DataFacts(
        "images",
        "boxes",
        needs_root=True,
        root="the folder that contains train.json, val.json and the folders train and val of their images",
        layout=root_layout.coco,
        is_in_root=True,
        index="optional",
        example="",
        channels=_argument("channels", 3),
        num_samples=count_annotated_images,
        args=image_args.CocoArgs,
        implementation="hpc_train.datasets.sources.coco:build",
    ),
    "text": DataFacts(
        "tokens",
        "next tokens",
        needs_root=True,
        root="a text file, or the folder that contains train.txt",
        layout=root_layout.text,
        is_in_root=True,
        example="",
        num_samples=count_sequences,
        args=TextArgs,
        implementation="hpc_train.datasets.sources.text:build",
    ),
    "tokens": DataFacts(
        "tokens",
        "next tokens",
        needs_root=True,
        root="the folder that contains train.txt, train.jsonl or train.bin",
        is_in_root=True,
        example="",
        num_samples=count_token_sequences,
        fingerprint=tokens_fingerprint,
        args=TokensArgs,
        implementation="hpc_train.datasets.sources.tokens:build",
    ),
}

#: The metrics of several classes per sample.
_MULTI_LABEL = ("f1_micro", "f1_macro", "map_multilabel")
#: The built-in tasks, one row each.
TASKS = {
    "classification": TaskFacts(
        ("images", "features"),
        ("class", "classes"),
        "hpc_train.tasks.classification:Classification",
        losses=losses.CLASSIFICATION,
        smooths_labels=True,
        mixes_targets=True,
        metrics=("loss", "accuracy", "accuracy_top5", *_MULTI_LABEL),
        target_metrics={"classes": _MULTI_LABEL},
        prediction_formats=(".jsonl", ".csv"),
    ),
    "regression": TaskFacts(
        ("images", "features"),
        ("number",),
        "hpc_train.tasks.regression:Regression",
        losses=losses.REGRESSION,
        smooths_labels=False,
        mixes_targets=False,
        metrics=("loss", "mae", "rmse", "r2"),
        prediction_formats=(".jsonl", ".csv"),
    ),
    "causal_lm": TaskFacts(
        ("tokens",),
        ("next tokens",),
        "hpc_train.tasks.causal_lm:CausalLM",
        losses=losses.CAUSAL_LM,
        smooths_labels=True,
        mixes_targets=False,
        metrics=("loss", "perplexity", "accuracy"),
        prediction_formats=(),
    ),
    "segmentation": TaskFacts(
        ("images",),
        ("mask",),
        "hpc_train.tasks.segmentation:Segmentation",
        losses=losses.SEGMENTATION,
        smooths_labels=True,
        mixes_targets=False,
        metrics=("loss", "accuracy", "miou", "iou_*"),
        prediction_formats=(),
    ),
    "detection": TaskFacts(
        ("images",),
        ("boxes",),
        "hpc_train.tasks.detection:Detection",
        needs_whole_model=True,
        smooths_labels=False,
        mixes_targets=False,
        metrics=("map", "map50"),
        prediction_formats=(".jsonl",),
    ),
}

_Row = TypeVar("_Row", DataFacts, TaskFacts)


def data_facts(name: str) -> DataFacts:
    """Return the facts of the data set that the file calls ``name``; the defaults for one without a row.

    Raises BadFileError where a plug-in's row can't be imported or is not a ``DataFacts``.
    """
    if is_factory(name):
        return DataFacts()
    provider = split_name(name)[0]
    return DATA_SETS.get(provider) or _exported("datasets", "data.name", provider, DataFacts())


def task_facts(name: str) -> TaskFacts:
    """Return what the task called ``name`` needs. Raises BadFileError like ``data_facts``."""
    if is_factory(name):
        return TaskFacts()
    return TASKS.get(name) or _exported("tasks", "task", name, TaskFacts())


def _exported(kind: str, key: str, name: str, default: _Row) -> _Row:
    row = load_traits(kind, name)
    if row is None:
        return default
    if not isinstance(row, type(default)):
        raise BadFileError(
            f"{key}: the facts of {name!r} are a {type(row).__name__}; "
            f"export a hpc_train.data_facts.facts.{type(default).__name__}"
        )
    return row


def _rows(kind: str, key: str, built_in: Mapping[str, _Row], default: _Row) -> dict[str, _Row]:
    """Return the rows of all parts of a kind, the built-in ones first.

    A plug-in whose row can't be imported is omitted: the file does not name it.
    """
    rows = dict(built_in)
    for name in described(kind):
        with suppress(Exception):
            rows[name] = _exported(kind, key, name, default)
    return rows


def target_of(data: DataConfig) -> Target | None:
    """Return what the target of a sample is; None where only the data set's own code knows it."""
    facts = data_facts(data.name)
    if facts.default_target is None:
        return facts.target
    given = data.args.get("target", facts.default_target)
    return next((each for each in get_args(Target) if each == given), None)


def training_samples(data: DataConfig) -> int | None:
    """Return N; None where only the data set's own code knows it."""
    return data_facts(data.name).num_samples(data)


def missing_root(data: DataConfig) -> Problem | None:
    """Return what is wrong where the data set needs ``data.root`` and the file has none."""
    facts, name = data_facts(data.name), data.name
    is_no_name = facts.example == "" and "/" in name
    if not facts.needs_root or name in facts.rootless or data.root is not None or is_no_name:
        return None
    return Problem(("data", "root"), f"is missing, and {shortened(name)} needs it", f"write {facts.root}")


def misplaced(data: DataConfig) -> Problem | None:
    """Return what the root lacks of the folders and files of its data set."""
    return None if data.root is None else data_facts(data.name).layout(expanded(data.root))


def missing_index(data: DataConfig) -> Problem | None:
    """Return what is wrong where ranks need an index of the data's files, which are here without one."""
    facts = data_facts(data.name)
    files = facts.listing(data) if facts.index == "required" and facts.listing is not None else []
    try:
        is_missing = bool(files) and not has_index(data, files)
    except OSError:  # the ranks may be able to read them
        return None
    return Problem(("data", "root"), *without_index(data, files)) if is_missing else None


def task_misfit(task: str, data_name: str, data: DataFacts) -> tuple[str, str] | None:
    """Return what keeps ``task`` from the data, and what to write instead; None where they fit."""
    needs = task_facts(task)
    if needs.fits(data):
        return None
    target = () if data.target is None else (data.target,)
    modality = () if data.modality is None else (data.modality,)
    all_tasks = _rows("tasks", "task", TASKS, TaskFacts())
    all_data = _rows("datasets", "data.name", DATA_SETS, DataFacts())
    tasks = [name for name, each in all_tasks.items() if each.fits(data)]
    others = [
        name
        for name, each in all_data.items()
        if needs.fits(each) and each.example == "" and each.target is not None
    ]
    remedies = [*tasks, f"data.name: {' or '.join(others)}"] if others else tasks
    wanted, found = _in_words(needs.modalities, needs.targets), _in_words(modality, target)
    message = f"{task} reads {wanted}, and {data_name} has {found}"
    return message, f"write {', or '.join(remedies) or 'another data set'}"


def _in_words(modalities: Sequence[str], targets: Sequence[str]) -> str:
    return (" or ".join(modalities) or "samples") + (f" (target: {' or '.join(targets)})" if targets else "")
