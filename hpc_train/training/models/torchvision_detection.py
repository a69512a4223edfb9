"""torchvision's detectors: Faster R-CNN, RetinaNet, FCOS and SSD, for images as the loader prepares them.

A detector returns a dict of losses in training, which also needs targets, and in evaluation a dict with
``boxes``, ``labels`` and ``scores`` per image. Labels count from 1; 0 is the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from hpc_train.experiment.data_facts.image_facts import is_detector

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


def create(name: str, num_classes: int, **arguments: Any) -> nn.Module:
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


def swap_head(name: str, model: nn.Module, num_classes: int, **arguments: Any) -> set[str]:
    """Replace the layers that depend on the classes by random layers; return the names of their tensors."""
    head = next((path for start, path in _HEADS.items() if name.startswith(start)), _ONE_STAGE_HEAD)
    arguments.pop("trainable_backbone_layers", None)  # torchvision warns: it is for pretrained backbones
    new = create(name, num_classes, **arguments).get_submodule(head)
    model.set_submodule(head, new)
    return {f"{head}.{key}" for key in new.state_dict()}
