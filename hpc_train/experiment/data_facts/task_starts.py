"""Defaults of ``init`` for each task: data, model and optimization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_train.experiment.data_facts.by_name import data_facts

#: Default side in pixels for images of varying size.
IMAGE_SIZE = 224
_ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.001, "weight_decay": 0.05}
#: The module of ``examples`` that files with this model need.
SMALL_DETECTOR = "examples.small_fcos:small_fcos"


@dataclass(frozen=True)
class Cost:
    """Core seconds of forward and backward per sample on a CPU: measured on one core of a Xeon server."""

    fixed_s: float
    #: Per pixel of an image, or token of a sequence.
    unit_s: float

    def of(self, units: int) -> float:
        """Return the core seconds of a sample of this many pixels or tokens."""
        return self.fixed_s + self.unit_s * units


@dataclass(frozen=True)
class Recipe:
    """How ``init`` trains on the user's own files, with or without GPUs."""

    model: str
    #: The learning rate is for ``batch`` and in proportion to it; with AdamW, to its square root.
    optimization: Mapping[str, Any]
    #: Maximum global batch size and micro-batch size.
    batch: int
    micro: int
    model_args: Mapping[str, Any] = field(default_factory=dict)
    #: Maximum side of images in pixels, the shorter one if they need not be squares.
    side: int = IMAGE_SIZE
    #: Without GPUs: epochs and image size are limited to a minute or two on two cores.
    cost: Cost | None = None
    #: Minimum side to which larger images are reduced for that.
    min_side: int = 48


@dataclass(frozen=True, kw_only=True)
class Start:
    """Defaults of ``init`` for a task."""

    task: str
    #: The data set without files, if there is one; then the data set for the user's own files.
    data: str
    own_data: str
    root: str
    model: str
    #: For the user's own data; default: ``model``.
    own_model: str = ""
    #: Keys of ``data`` for ``own_data``; the user must adapt the keys in ``to_change``.
    own_keys: Mapping[str, Any] = field(default_factory=dict)
    model_args: Mapping[str, Any] = field(default_factory=dict)
    optimization: Mapping[str, Any] = field(default_factory=dict)
    global_batch_size: int = 64
    micro_batch_size: int = 16
    metric: tuple[str, str] = ("loss", "min")
    to_change: tuple[str, ...] = ()
    #: For the user's own files, if they are here: with GPUs, and without.
    gpu: Recipe
    cpu: Recipe

    def data_for(self, root: str | None) -> str:
        """Return the data set if only the root is given."""
        return self.data if root is None else self.own_data

    def model_for(self, data: str | None) -> str:
        """Return the model for the data set."""
        is_default = data == self.data != self.own_data
        return self.model if is_default else self.own_model or self.model

    def needs_root(self, data: str | None) -> bool:
        """Return True if the data set needs ``data.root``."""
        name = data or self.data
        return data_facts(name).needs_root and name not in data_facts(name).rootless


#: arXiv:1706.02677: a learning rate of 0.1 for a batch of 256.
_RESNET_SGD: dict[str, Any] = {
    "optimizer": {
        "name": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "args": {"nesterov": True},
    }
}
_FAST_ADAMW: dict[str, Any] = {"optimizer": _ADAMW | {"lr": 0.002}}
_SMOOTHED = {"label_smoothing": 0.1}
_CLIPPED = {"clip_grad_norm": 5.0}
_GPT_ARGS = {"num_layers": 4, "num_heads": 4, "dim": 128}
_GPT_OPTIMIZATION: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1, "decay_norm_and_bias": False},
    "clip_grad_norm": 1.0,
}
#: For a minute or two on a CPU: fewer parameters, more steps, and the learning rate of a smaller model.
_SMALL_GPT_ARGS = {"num_layers": 3, "num_heads": 4, "dim": 96}
_SMALL_GPT_OPTIMIZATION: dict[str, Any] = _GPT_OPTIMIZATION | {
    "optimizer": _GPT_OPTIMIZATION["optimizer"] | {"lr": 0.004, "args": {"betas": [0.9, 0.95]}}
}
_SMALL_RESNET_COST = Cost(3e-4, 5.6e-7)
#: The first one is the default.
STARTS = (
    Start(
        task="classification",
        data="digits",
        own_data="imagefolder",
        root="data/images",
        model="timm/test_resnet",
        own_model="timm/resnet18",
        own_keys={"image_size": IMAGE_SIZE, "augment": {"random_resized_crop": {}, "hflip": 0.5}},
        optimization={"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005}},
        metric=("accuracy", "max"),
        gpu=Recipe("timm/resnet18", _RESNET_SGD | _SMOOTHED, 256, 64),
        cpu=Recipe("timm/test_resnet", _FAST_ADAMW | _SMOOTHED, 128, 64, cost=_SMALL_RESNET_COST),
    ),
    Start(
        task="segmentation",
        data="segmentation_folder",
        own_data="segmentation_folder",
        root="data/segmentation",
        model="torchvision/lraspp_mobilenet_v3_large",
        own_keys={
            "args": {"num_classes": 21, "ignore_index": 255},
            "image_size": IMAGE_SIZE,
            "augment": {"random_scale": [0.5, 2.0], "hflip": 0.5},
        },
        optimization={"optimizer": _ADAMW},
        global_batch_size=16,
        micro_batch_size=8,
        metric=("miou", "max"),
        to_change=("args",),
        gpu=Recipe("torchvision/lraspp_mobilenet_v3_large", {"optimizer": _ADAMW}, 16, 8, side=512),
        # Small batches: the running statistics of its BatchNorm need hundreds of steps.
        cpu=Recipe(
            "torchvision/lraspp_mobilenet_v3_large", _FAST_ADAMW, 8, 8, cost=Cost(1.7e-2, 1.2e-6), min_side=64
        ),
    ),
    Start(
        task="detection",
        data="coco",
        own_data="coco",
        root="data/coco",
        model="torchvision/ssdlite320_mobilenet_v3_large",
        own_keys={"image_size": 320, "augment": {"hflip": 0.5}},
        optimization={"optimizer": _ADAMW, "clip_grad_norm": 5.0},
        global_batch_size=16,
        micro_batch_size=8,
        metric=("map", "max"),
        gpu=Recipe(
            "torchvision/ssdlite320_mobilenet_v3_large", {"optimizer": _ADAMW} | _CLIPPED, 16, 8, side=320
        ),
        cpu=Recipe(SMALL_DETECTOR, _FAST_ADAMW | _CLIPPED, 16, 8, {"width": 32}, 160, Cost(3e-3, 5.5e-7), 96),
    ),
    Start(
        task="regression",
        data="image_list",
        own_data="image_list",
        root="data/regression",
        model="timm/resnet18",
        own_keys={
            "args": {"target": "number", "path_column": "path", "target_column": "target"},
            "image_size": IMAGE_SIZE,
        },
        optimization={"optimizer": _ADAMW},
        to_change=("args",),
        gpu=Recipe("timm/resnet18", {"optimizer": _ADAMW}, 128, 64),
        cpu=Recipe("timm/test_resnet", _FAST_ADAMW, 128, 64, cost=_SMALL_RESNET_COST),
    ),
    Start(
        task="causal_lm",
        data="text",
        own_data="text",
        root="data/text.txt",
        model="gpt",
        own_keys={"args": {"sequence_length": 128, "val_fraction": 0.1}},
        model_args=_GPT_ARGS,
        optimization=_GPT_OPTIMIZATION,
        global_batch_size=32,
        micro_batch_size=16,
        gpu=Recipe("gpt", _GPT_OPTIMIZATION, 64, 16, {"num_layers": 6, "num_heads": 6, "dim": 384}),
        cpu=Recipe("gpt", _SMALL_GPT_OPTIMIZATION, 16, 16, _SMALL_GPT_ARGS, cost=Cost(1e-3, 5e-5)),
    ),
)
