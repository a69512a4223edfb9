"""Defaults of ``init`` for each task: data, model and optimization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_train.experiment.data_facts.by_name import data_facts

#: Default side in pixels for images of varying size.
IMAGE_SIZE = 224
_ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.001, "weight_decay": 0.05}


@dataclass(frozen=True)
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

    def data_for(self, root: str | None) -> str:
        """Return the data set if only the root is given."""
        return self.data if root is None else self.own_data

    def model_for(self, data: str | None) -> str:
        """Return the model for the data set."""
        return (
            self.model if data == self.data and self.data != self.own_data else self.own_model or self.model
        )

    def needs_root(self, data: str | None) -> bool:
        """Return True if the data set needs ``data.root``."""
        name = data or self.data
        return data_facts(name).needs_root and name not in data_facts(name).rootless


#: The first one is the default.
STARTS = (
    Start(
        "classification", "digits", "imagefolder", "data/images", "timm/test_resnet", "timm/resnet18",
        own_keys={"image_size": IMAGE_SIZE, "augment": {"random_resized_crop": {}, "hflip": 0.5}},
        optimization={"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005}},
        metric=("accuracy", "max"),
    ),
    Start(
        "segmentation", "segmentation_folder", "segmentation_folder", "data/segmentation",
        "torchvision/lraspp_mobilenet_v3_large",
        own_keys={
            "args": {"num_classes": 21, "ignore_index": 255},
            "image_size": IMAGE_SIZE,
            "augment": {"random_scale": [0.5, 2.0], "hflip": 0.5},
        },
        optimization={"optimizer": _ADAMW},
        global_batch_size=16, micro_batch_size=8, metric=("miou", "max"), to_change=("args",),
    ),
    Start(
        "detection", "coco", "coco", "data/coco", "torchvision/ssdlite320_mobilenet_v3_large",
        own_keys={"image_size": 320, "augment": {"hflip": 0.5}},
        optimization={"optimizer": _ADAMW, "clip_grad_norm": 5.0},
        global_batch_size=16, micro_batch_size=8, metric=("map", "max"),
    ),
    Start(
        "regression", "image_list", "image_list", "data/regression", "timm/resnet18",
        own_keys={
            "args": {"target": "number", "path_column": "path", "target_column": "target"},
            "image_size": IMAGE_SIZE,
        },
        optimization={"optimizer": _ADAMW},
        to_change=("args",),
    ),
    Start(
        "causal_lm", "text", "text", "data/text.txt", "gpt",
        own_keys={"args": {"sequence_length": 128, "val_fraction": 0.1}},
        model_args={"num_layers": 4, "num_heads": 4, "dim": 128},
        optimization={
            "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1, "decay_norm_and_bias": False},
            "clip_grad_norm": 1.0,
        },
        global_batch_size=32, micro_batch_size=16,
    ),
)  # fmt: skip
