"""``torchvision/<name>``: torchvision's models that classify, segment or detect.

Detectors are Faster R-CNN, RetinaNet, FCOS and SSD, for images as the loader prepares them. A detector
returns a dict of losses in training, which also needs targets, and in evaluation a dict with ``boxes``,
``labels`` and ``scores`` per image. Labels count from 1; 0 is the background.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.image_facts import is_detector, model_problem
from hpc_train.experiment.validate.part_rules import not_an_argument, unlisted
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.base import (
    Preprocessing,
    no_preprocessing,
    no_weights,
    parameter_names,
    unknown_argument,
    wrong_arguments,
)
from hpc_train.training.models.weights import (
    StateDict,
    head_name,
    hub_report,
    keep_report,
    load_weights,
)

#: In training these also return auxiliary logits, which a classification loss can't use.
_WITH_AUXILIARY_LOGITS = ("googlenet", "inception_v3")
#: Arguments of torchvision in whose place the file has a key of its own; all but the first are of detectors.
_OTHER_KEYS = {
    "weights": "model.pretrained",
    "weights_backbone": "model.pretrained",
    "min_size": "data.image_size",
    "max_size": "data.image_size",
    "image_mean": "data.normalize",
    "image_std": "data.normalize",
}


def model_names() -> list[str]:
    """Return the names of torchvision's classification and segmentation models and detectors."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return [*names, *_segmentation_names(), *detector_names()]


def listed_names() -> dict[str, list[str]]:
    """Return the names after ``torchvision/``."""
    return {"torchvision": model_names()}


def _segmentation_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models.segmentation)


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build torchvision's model ``rest``; greyscale images are repeated to its 3 channels."""
    if rest not in (names := model_names()):
        raise unlisted(("model", "name"), "torchvision", "model", rest, names).as_error()
    if problem := model_problem(config.name, info.channels):
        raise problem.as_error()
    arguments = _arguments(rest, config)
    num_classes = arguments.pop("num_classes", info.num_classes)
    if config.pretrained is True:
        model = _with_hub_weights(rest, config, arguments, download=download)
        random = _random_head(rest, model, num_classes, arguments)
        keep_report(model, hub_report(model, f"torchvision ({rest})", random))
    else:
        model = _create(rest, config, {"num_classes": num_classes} | arguments)
        if isinstance(config.pretrained, str):
            load_weights(model, config.pretrained, convert=convert_weights)
    if info.channels == 1:
        model.register_forward_pre_hook(_repeat_grey)
    return model


def _random_head(name: str, model: nn.Module, num_classes: int, arguments: Arguments) -> set[str]:
    """Give the model a head for ``num_classes``; return the names of its random tensors."""
    if is_detector(f"torchvision/{name}"):
        return swap_detector_head(name, model, num_classes, **arguments)
    swapped = [head for head in _heads(name, model) if _swap_head(model, head, num_classes)]
    return {key for key in model.state_dict() if key.rpartition(".")[0] in swapped}


def _arguments(name: str, config: ModelConfig) -> Arguments:
    for key, instead in _OTHER_KEYS.items():
        if key in config.args and (key == "weights" or is_detector(config.name)):
            raise not_an_argument(("model", "args"), key, instead).as_error()
    if name in _segmentation_names() and config.pretrained is not True:
        return {"weights_backbone": None} | config.args
    if name not in _WITH_AUXILIARY_LOGITS:
        return dict(config.args)
    random = {} if config.pretrained is True else {"init_weights": True}
    return {"aux_logits": False} | random | config.args


def _create(name: str, config: ModelConfig, arguments: Arguments) -> nn.Module:
    try:
        if is_detector(config.name):
            return _created_detector(name, config, arguments)
        model: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    return model


def _created_detector(name: str, config: ModelConfig, arguments: Arguments) -> nn.Module:
    """Return the detector. torchvision ignores arguments that it does not know; they are refused here."""
    model = create_detector(name, **arguments)
    available = {
        *parameter_names(type(model)),
        *parameter_names(torchvision.models.get_model_builder(name)),
        "trainable_backbone_layers",
    }
    for key in config.args:
        if key not in available:
            raise unknown_argument(config, key, available)
    return model


def _known_arguments(name: str) -> list[str]:
    extra: Arguments = {"init_weights": True} if name in _WITH_AUXILIARY_LOGITS else {}
    if is_detector(f"torchvision/{name}"):
        extra = {"weights_backbone": None}
    with torch.device("meta"):
        return parameter_names(type(torchvision.models.get_model(name, weights=None, **extra)))


def _with_hub_weights(name: str, config: ModelConfig, arguments: Arguments, *, download: bool) -> nn.Module:
    weights: Any = torchvision.models.get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if not (download or cached.exists()):
        raise no_weights(f"torchvision/{name}", f"{cached} does not exist")
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=weights, **arguments)
    except (TypeError, ValueError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    except (OSError, RuntimeError) as error:  # no network; a damaged file
        raise no_weights(f"torchvision/{name}", error) from error
    return as_given(model) if is_detector(f"torchvision/{name}") else model


def preprocessing_of(rest: str, config: ModelConfig, *, download: bool) -> Preprocessing:
    """Return the preprocessing of torchvision's default weights; the network is not used."""
    try:
        transforms = torchvision.models.get_model_weights(rest).DEFAULT.transforms()
    except (ValueError, AttributeError) as error:
        raise no_preprocessing(f"torchvision/{rest} has no pretrained weights") from error
    if is_detector(f"torchvision/{rest}"):  # which normalize images themselves
        with torch.device("meta"):
            transform: Any = torchvision.models.get_model(rest, weights=None, weights_backbone=None).transform
        return Preprocessing(list(transform.image_mean), list(transform.image_std))
    mean, std = list(transforms.mean), list(transforms.std)
    if not hasattr(transforms, "crop_size"):  # segmentation
        return Preprocessing(mean, std)
    crop: float = transforms.crop_size[0] / transforms.resize_size[0]
    return Preprocessing(mean, std, str(transforms.interpolation.value), min(1.0, crop))


def convert_weights(model: nn.Module, weights: StateDict) -> StateDict:
    """Resample the position embeddings of a ViT for another image size, like timm."""
    name = "encoder.pos_embedding"
    loaded, expected = weights.get(name), model.state_dict().get(name)
    if loaded is None or expected is None or loaded.dim() != 3 or loaded.shape == expected.shape:
        return weights
    side, given_side = (math.isqrt(tokens.shape[1] - 1) for tokens in (expected, loaded))
    if side**2 + 1 != expected.shape[1] or given_side**2 + 1 != loaded.shape[1]:
        return weights
    from timm.layers import resample_abs_pos_embed

    return weights | {name: resample_abs_pos_embed(loaded, [side, side], num_prefix_tokens=1)}


def _heads(name: str, model: nn.Module) -> list[str]:
    """Return the names of the layers that produce logits: one, except for segmentation models."""
    if name in _segmentation_names():
        convolutions = [layer for layer, module in model.named_modules() if isinstance(module, nn.Conv2d)]
        # lraspp adds the logits of two resolutions; the other models may have an auxiliary head.
        starts = ("classifier.low_classifier", "classifier.high_classifier", "aux_classifier", "classifier")
        groups = [[layer for layer in convolutions if layer.startswith(start)] for start in starts]
        return [names[-1] for names in (groups[:2] if groups[0] else groups[2:]) if names]
    head = head_name(model)
    assert head is not None, "every model of torchvision has a linear layer or a convolution"
    return [head]


def _swap_head(model: nn.Module, name: str, num_classes: int) -> bool:
    """Replace a layer that produces logits by a random one, unless it already has the right size."""
    old = model.get_submodule(name)
    if isinstance(old, nn.Linear):
        if old.out_features == num_classes:
            return False
        new: nn.Module = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    else:
        assert isinstance(old, nn.Conv2d)
        if old.out_channels == num_classes:
            return False
        new = nn.Conv2d(old.in_channels, num_classes, kernel_size=(1, 1))
    model.set_submodule(name, new)
    return True


def _repeat_grey(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give (B, 1, H, W) as (B, 3, H, W). A hook, not a wrapper: parameters keep their names."""
    images, *rest = inputs
    return (images.expand(-1, 3, -1, -1), *rest) if images.shape[1] == 1 else inputs


#: The layers that depend on the classes, by the beginning of the model's name.
_HEADS = {"fasterrcnn_": "roi_heads.box_predictor"}
_ONE_STAGE_HEAD = "head.classification_head"


def detector_names() -> list[str]:
    """Return the names of torchvision's detectors."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models.detection)
    return [name for name in names if is_detector(f"torchvision/{name}")]


class AsGiven(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Neither resizes nor normalizes images: the loader and the device have done it.

    Only pads a batch so that its sides are multiples of the backbone's stride.
    """

    def __init__(self, size_divisible: int) -> None:
        super().__init__(1, 1, [0.0], [1.0], size_divisible)

    def normalize(self, image: Tensor) -> Tensor:
        """Return the image as it is."""
        return image

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        """Return image and target as they are."""
        return image, target


def create_detector(name: str, num_classes: int, **arguments: Any) -> nn.Module:
    """Return the detector with random weights. ``num_classes`` does not count the background.

    Raises torchvision's errors for invalid arguments.
    """
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=num_classes + 1, **arguments
    )
    return with_losses_per_image(as_given(model))


def as_given(model: nn.Module) -> nn.Module:
    """Return the detector without its own resizing and normalization."""
    transform: Any = model.transform
    model.transform = AsGiven(transform.size_divisible)
    return model


def with_losses_per_image(model: nn.Module) -> nn.Module:
    """Return the detector with losses that are means over the images, as RetinaNet's are.

    torchvision divides the losses of SSD and FCOS by the matched anchors of the whole micro-batch, so that
    they would depend on its size. Faster R-CNN's losses are means over its samples of anchors and proposals,
    a fixed number per image.
    """
    if isinstance(model, SSD | FCOS):
        compute: Any = partial(_mean_over_images, model.compute_loss)
        model.compute_loss = compute
    return model


def _mean_over_images(
    compute_loss: Callable[..., dict[str, Tensor]],
    targets: Sequence[dict[str, Tensor]],
    head_outputs: dict[str, Tensor],
    anchors: Sequence[Tensor],
    matches: Sequence[Any],
) -> dict[str, Tensor]:
    """``matches``: SSD's matched anchors of each image, or FCOS's numbers of anchors, the same for all."""
    losses = []
    for place in range(len(targets)):
        index = slice(place, place + 1)
        outputs = {name: values[index] for name, values in head_outputs.items()}
        of_image = matches[index] if isinstance(matches[0], Tensor) else matches
        losses.append(compute_loss(targets[index], outputs, anchors[index], of_image))
    return {name: torch.stack([image_losses[name] for image_losses in losses]).mean() for name in losses[0]}


def swap_detector_head(name: str, model: nn.Module, num_classes: int, **arguments: Any) -> set[str]:
    """Replace the layers that depend on the classes by random layers; return the names of their tensors."""
    head = next((path for start, path in _HEADS.items() if name.startswith(start)), _ONE_STAGE_HEAD)
    arguments.pop("trainable_backbone_layers", None)  # torchvision warns: it is for pretrained backbones
    new = create_detector(name, num_classes, **arguments).get_submodule(head)
    model.set_submodule(head, new)
    return {f"{head}.{key}" for key in new.state_dict()}
