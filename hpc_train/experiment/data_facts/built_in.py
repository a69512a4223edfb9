"""The rows of the built-in data sets, providers of models and tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import (
    data_size,
    facts,
    image_facts,
    listed_data,
    root_layout,
    token_shards,
)
from hpc_train.experiment.data_facts.facts import DataFacts, ModelFacts, TaskFacts
from hpc_train.paths import expanded
from hpc_train.registry import split_name

#: scikit-learn's 1,797 digits without every fifth, which is validation.
_DIGITS = 1438
#: Number of samples of ``synthetic`` by default.
_SYNTHETIC_DEFAULT = 1024
#: The side of the images of ``digits``, and of ``synthetic`` by default.
_DIGITS_SIZE = _SYNTHETIC_SIZE = 32


def _argument(name: str, default: int) -> Callable[[DataConfig], int | None]:
    """Return a reader of a number in ``data.args``; it returns None for values that the data set refuses."""

    def read(data: DataConfig) -> int | None:
        value = data.args.get(name, default)
        return value if type(value) is int and value > 0 else None

    return read


def _synthetic_samples(data: DataConfig) -> int | None:
    value = data.args.get("num_samples", _SYNTHETIC_DEFAULT)
    return value if type(value) is int else None


#: Number of classes of ``digits``, and of ``synthetic`` by default.
_CLASSES_OF_DIGITS = 10


class _Published(NamedTuple):
    """Facts of a data set of torchvision by its authors. None: its arguments or images determine it."""

    #: In the training split.
    samples: int | None = None
    classes: int | None = None
    channels: int | None = None
    #: The side of the images, if they are square and of equal size.
    side: int | None = None


TORCHVISION = {
    "CIFAR10": _Published(50_000, 10, 3, 32),
    "CIFAR100": _Published(50_000, 100, 3, 32),
    "Cityscapes": _Published(2_975),
    "Country211": _Published(31_650),
    "DTD": _Published(1_880),
    "EMNIST": _Published(None, None, 1, 28),
    "FER2013": _Published(None, None, 1, 48),
    "FGVCAircraft": _Published(3_334),
    "FashionMNIST": _Published(60_000, 10, 1, 28),
    "Flowers102": _Published(1_020, 102),
    "Food101": _Published(75_750, 101),
    "GTSRB": _Published(26_640),
    "ImageNet": _Published(1_281_167, 1_000),
    "KMNIST": _Published(60_000, 10, 1, 28),
    "MNIST": _Published(60_000, 10, 1, 28),
    "OxfordIIITPet": _Published(3_680, 37),
    "PCAM": _Published(262_144, None, 3, 96),
    "QMNIST": _Published(60_000, None, 1, 28),
    "RenderedSST2": _Published(6_920),
    "STL10": _Published(5_000, 10, 3, 96),
    "SVHN": _Published(73_257, 10, 3, 32),
    "StanfordCars": _Published(8_144),
    "USPS": _Published(7_291, 10, 1, 16),
    "VOCSegmentation": _Published(1_464),
}


def _published(data: DataConfig) -> _Published:
    return TORCHVISION.get(split_name(data.name)[1], _Published())


def _image_files(**facts: Any) -> DataFacts:
    channels = _argument("channels", 3)
    return DataFacts("images", needs_root=True, is_in_root=True, example="", channels=channels, **facts)


#: The built-in data sets, one row each.
DATA_SETS = {
    "digits": DataFacts(
        "images",
        "class",
        example="",
        image_size=lambda data: _DIGITS_SIZE,
        channels=_argument("channels", 1),
        num_classes=lambda data: _CLASSES_OF_DIGITS,
        num_samples=lambda data: _DIGITS,
        args=image_facts.DigitsArgs,
        implementation="hpc_train.training.datasets.sources.digits:build",
    ),
    "synthetic": DataFacts(
        "images",
        "class",
        example="",
        image_size_argument="image_size",
        image_size=lambda data: _SYNTHETIC_SIZE,
        channels=_argument("channels", 3),
        num_classes=_argument("num_classes", _CLASSES_OF_DIGITS),
        num_samples=_synthetic_samples,
        args=image_facts.SyntheticArgs,
        implementation="hpc_train.training.datasets.sources.synthetic:build",
    ),
    "imagefolder": _image_files(
        target="class",
        root="the folder that contains train/<class>/ and val/<class>/",
        layout=root_layout.image_folder,
        is_packable=True,
        num_samples=lambda data: data_size.count_images(expanded(data.root) / "train") if data.root else None,
        args=image_facts.ImageFolderArgs,
        implementation="hpc_train.training.datasets.sources.imagefolder:build",
    ),
    "image_list": _image_files(
        default_target="class",
        root="the folder of the lists and images",
        listing=listed_data.image_list_files,
        listed_names=listed_data.listed_images,
        index="optional",
        num_samples=listed_data.count_listed,
        args=listed_data.ImageListArgs,
        implementation="hpc_train.training.datasets.sources.image_list:build",
    ),
    "webdataset": _image_files(
        default_target="class",
        root="the folder of the tar files",
        listing=listed_data.webdataset_files,
        index="required",
        num_samples=listed_data.count_shards,
        args=listed_data.WebdatasetArgs,
        implementation="hpc_train.training.datasets.sources.webdataset:build",
    ),
    "segmentation_folder": _image_files(
        target="mask",
        root="the folder that contains train/images/ and train/masks/",
        layout=root_layout.segmentation_folder,
        num_classes=_argument("num_classes", 0),
        num_samples=lambda data: data_size.count_masked_images(expanded(data.root)) if data.root else None,
        args=image_facts.SegmentationFolderArgs,
        implementation="hpc_train.training.datasets.sources.segmentation_folder:build",
    ),
    "huggingface": DataFacts(
        "images",
        needs_root=True,
        is_downloaded=True,
        is_on_hub=True,
        root="the folder of a data set saved by save_to_disk, or to which prepare saves it",
        is_in_root=True,
        listing=listed_data.arrow_files,
        channels=_argument("channels", 3),
        args=listed_data.HuggingFaceArgs,
        implementation="hpc_train.training.datasets.sources.huggingface:build",
    ),
    "torchvision": DataFacts(
        "images",
        needs_root=True,
        is_downloaded=True,
        rootless=("torchvision/FakeData",),
        root="the folder of torchvision's files, for example data/cifar10",
        example="torchvision/CIFAR10",
        is_listed=True,
        image_size=lambda data: _published(data).side,
        channels=lambda data: _published(data).channels,
        num_classes=lambda data: _published(data).classes,
        # An argument may select another part of the data.
        num_samples=lambda data: None if data.args else _published(data).samples,
        implementation="hpc_train.training.datasets.sources.torchvision:build",
    ),
    "coco": _image_files(
        target="boxes",
        root="the folder that contains train.json, val.json and the folders train and val of their images",
        layout=root_layout.coco,
        index="optional",
        num_samples=data_size.count_annotated_images,
        args=image_facts.CocoArgs,
        implementation="hpc_train.training.datasets.sources.coco:build",
    ),
    "text": DataFacts(
        "tokens",
        "next tokens",
        needs_root=True,
        root="a text file, or the folder that contains train.txt",
        layout=root_layout.text,
        is_in_root=True,
        example="",
        num_samples=data_size.count_sequences,
        args=data_size.TextArgs,
        implementation="hpc_train.training.datasets.sources.text:build",
    ),
    "tokens": DataFacts(
        "tokens",
        "next tokens",
        needs_root=True,
        root="the folder that contains train.txt, train.jsonl or train.bin",
        is_in_root=True,
        example="",
        num_samples=token_shards.count_token_sequences,
        fingerprint=token_shards.tokens_fingerprint,
        args=token_shards.TokensArgs,
        implementation="hpc_train.training.datasets.sources.tokens:build",
    ),
}

#: The built-in providers of models, one row each.
MODELS = {
    "timm": ModelFacts(
        implementation="hpc_train.training.models.timm:build",
        modality="images",
        listed_by="hpc_train.training.models.timm:listed_names",
        example="timm/resnet50",
        package="timm",
        preprocessing="hpc_train.training.models.timm:preprocessing_of",
        weights_from="hub",
    ),
    "torchvision": ModelFacts(
        implementation="hpc_train.training.models.torchvision:build",
        modality="images",
        listed_by="hpc_train.training.models.torchvision:listed_names",
        example="torchvision/resnet50",
        package="torchvision",
        preprocessing="hpc_train.training.models.torchvision:preprocessing_of",
        weights_from="torch",
    ),
    "gpt": ModelFacts(implementation="hpc_train.training.models.gpt:build", modality="tokens"),
    "hf": ModelFacts(implementation="hpc_train.training.models.huggingface:build"),
    "smp": ModelFacts(
        implementation="hpc_train.training.models.segmentation_models:build",
        modality="images",
        listed_by="hpc_train.training.models.segmentation_models:listed_names",
        example="smp/unet",
        package="segmentation-models-pytorch",
        preprocessing="hpc_train.training.models.segmentation_models:preprocessing_of",
        weights_from="hub",
        names_weights=False,  # after the encoder
        stride=32,
    ),
}

#: The metrics of several classes per sample.
_MULTI_LABEL = ("f1_micro", "f1_macro", "map_multilabel")
#: The built-in tasks, one row each.
TASKS = {
    "classification": TaskFacts(
        ("images", "features"),
        ("class", "classes"),
        "hpc_train.training.tasks.classification:Classification",
        losses=facts.CLASSIFICATION_LOSSES,
        smooths_labels=True,
        mixes_targets=True,
        metrics=("loss", "accuracy", "accuracy_top5", *_MULTI_LABEL),
        target_metrics={"classes": _MULTI_LABEL},
        prediction_formats=(".jsonl", ".csv"),
    ),
    "regression": TaskFacts(
        ("images", "features"),
        ("number",),
        "hpc_train.training.tasks.regression:Regression",
        losses=facts.REGRESSION_LOSSES,
        smooths_labels=False,
        mixes_targets=False,
        metrics=("loss", "mae", "rmse", "r2"),
        prediction_formats=(".jsonl", ".csv"),
    ),
    "causal_lm": TaskFacts(
        ("tokens",),
        ("next tokens",),
        "hpc_train.training.tasks.causal_lm:CausalLM",
        losses=facts.CAUSAL_LM_LOSSES,
        smooths_labels=True,
        mixes_targets=False,
        metrics=("loss", "perplexity", "accuracy"),
        prediction_formats=(),
    ),
    "segmentation": TaskFacts(
        ("images",),
        ("mask",),
        "hpc_train.training.tasks.segmentation:Segmentation",
        losses=facts.SEGMENTATION_LOSSES,
        smooths_labels=True,
        mixes_targets=False,
        metrics=("loss", "accuracy", "miou", "iou_*"),
        prediction_formats=(),
    ),
    "detection": TaskFacts(
        ("images",),
        ("boxes",),
        "hpc_train.training.tasks.detection:Detection",
        needs_whole_model=True,
        smooths_labels=False,
        mixes_targets=False,
        metrics=("map", "map50"),
        prediction_formats=(".jsonl",),
    ),
}
