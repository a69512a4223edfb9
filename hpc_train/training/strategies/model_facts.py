"""Facts about models, for commands that don't import torch: ``validate.model_facts`` calls it in a child.

Models are built on the meta device, without memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.by_name import provider_facts
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models import blocks, building, splitting, weights
from hpc_train.training.models.base import UnknownArgumentError
from hpc_train.training.strategies.batchnorm import has_batchnorm
from hpc_train.training.strategies.tensor_layers import numbers_shared, shareable_in

#: Image size of models that don't declare it.
_USUAL_SIZE = 224
_CHANNELS = 3
#: Side of a square, or height and width, in pixels.
ImageSize = int | list[int]


def answer(name: str, args: dict[str, Any], image_size: ImageSize | None = None) -> dict[str, Any]:
    """Return ``facts``, or ``args_refusal`` if the model does not take an argument."""
    try:
        return facts(name, args, image_size)
    except UnknownArgumentError as error:
        return {"args_refusal": str(error)}


def facts(name: str, args: dict[str, Any], image_size: ImageSize | None = None) -> dict[str, Any]:
    """Build the model and return the facts that decide whether the file's options can train it.

    ``has_batchnorm``, and for ranks that share layers the fields of ``validate.layer_rules.LayerFacts``:
    ``shared`` (only the first of equal numbers), ``dropout_key`` and ``most_stages``. If the model can't take
    images of ``image_size`` (pixels: of a square, or height and width) also ``size_refusal``, the reason;
    ``fitting_size``, a valid size; and ``takes_img_size``, whether it can be built for another size. Raises
    BadFileError if there is no such model.
    """
    model = _on_meta(name, args)
    result = {"has_batchnorm": has_batchnorm(model)} | _facts_of_layers(model)
    return result if image_size is None else result | _facts_of_size(name, model, image_size)


def tensors(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes of the model's weights and buffers by name, and in ``head`` the names of its head.

    The size of the head is arbitrary. Raises BadFileError if there is no such model.
    """
    model = _on_meta(name, args)
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items() if tensor.ndim}
    return {"tensors": shapes, "head": sorted(weights.head_keys(model))}


def _on_meta(name: str, args: dict[str, Any]) -> nn.Module:
    values = (0.5,) * _CHANNELS
    info = DataInfo(num_classes=10, channels=_CHANNELS, mean=values, std=values)
    with torch.device("meta"):
        return building.build_model(ModelConfig(name=name, args=args), info)


def _facts_of_size(name: str, model: nn.Module, image_size: ImageSize) -> dict[str, Any]:
    """Return the facts of a refused size; empty if the model accepts it, or fails on meta at its own too."""
    model.eval()
    refusal = _refusal(model, image_size)
    if refusal is None:
        return {}
    own_size: int = getattr(model, "pretrained_cfg", {}).get("input_size", (_USUAL_SIZE,))[-1]
    sizes = [_next_multiple(image_size, provider_facts(name).stride), own_size]
    fitting = next((size for size in sizes if _refusal(model, size) is None), None)
    if fitting is None:
        return {}
    is_fixed = "doesn't match model" in refusal  # the words of timm's models and encoders
    return {"size_refusal": refusal, "fitting_size": fitting, "takes_img_size": is_fixed}


def _next_multiple(image_size: ImageSize, stride: int) -> ImageSize:
    """Return the next larger size that is a multiple of ``stride``."""
    if isinstance(image_size, int):
        return -(-image_size // stride) * stride
    return [-(-side // stride) * stride for side in image_size]


def _refusal(model: nn.Module, image_size: ImageSize) -> str | None:
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.empty(2, _CHANNELS, height, width, device="meta")
    try:
        with torch.no_grad():
            model(images)
    except Exception as error:  # any error of the model's code
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def _facts_of_layers(model: nn.Module) -> dict[str, Any]:
    shareables = shareable_in(model)
    first: dict[int, str] = {}
    for label, number in numbers_shared(shareables).items():
        first.setdefault(number, label)
    dropout_keys = (item.attention_key for item in shareables.values() if item.attention_dropout > 0)
    return {
        "shared": {label: number for number, label in first.items()},
        "dropout_key": next(dropout_keys, None),
        "most_stages": splitting.most_stages(model, blocks.find_blocks(model)),
    }
