"""``torchvision/<name>``: torchvision's classification models, with its weights or a file's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from hpc_train.config.fields import Arguments
from hpc_train.config.training_sections import ModelConfig
from hpc_train.data_facts.channels import model_problem
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.models.arguments import parameter_names, wrong_arguments
from hpc_train.models.weights import (
    StateDict,
    head_keys,
    head_name,
    hub_report,
    keep_report,
    load_weights,
)
from hpc_train.validate.part_rules import not_an_argument, unlisted

#: In training these also return auxiliary logits, which a classification loss can't use.
_WITH_AUXILIARY_LOGITS = ("googlenet", "inception_v3")


def model_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build torchvision's model ``rest``; greyscale images are repeated to its 3 channels."""
    _refuse_unknown(rest)
    if problem := model_problem(config.name, info.channels):
        raise problem.as_error()
    arguments = _arguments(rest, config)
    num_classes = arguments.pop("num_classes", info.num_classes)
    if config.pretrained is True:
        model = _with_hub_weights(rest, config, arguments, download=download)
        random = head_keys(model) if _swap_head(model, num_classes) else set()
        keep_report(model, hub_report(model, f"torchvision ({rest})", random))
    else:
        model = _create(rest, config, {"num_classes": num_classes} | arguments)
        if isinstance(config.pretrained, str):
            load_weights(model, config.pretrained, convert=lambda weights: _resampled(model, weights))
    if info.channels == 1:
        model.register_forward_pre_hook(_repeat_grey)
    return model


def _refuse_unknown(name: str) -> None:
    if name not in model_names():
        raise unlisted(("model", "name"), "torchvision", "model", name, model_names()).as_error()


def _arguments(name: str, config: ModelConfig) -> Arguments:
    if "weights" in config.args:
        raise not_an_argument(("model", "args"), "weights", "model.pretrained").as_error()
    if name not in _WITH_AUXILIARY_LOGITS:
        return dict(config.args)
    random = {} if config.pretrained is True else {"init_weights": True}
    return {"aux_logits": False} | random | config.args


def _create(name: str, config: ModelConfig, arguments: Arguments) -> nn.Module:
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    return model


def _known_arguments(name: str) -> list[str]:
    extra: Arguments = {"init_weights": True} if name in _WITH_AUXILIARY_LOGITS else {}
    with torch.device("meta"):
        return parameter_names(type(torchvision.models.get_model(name, weights=None, **extra)))


def _with_hub_weights(name: str, config: ModelConfig, arguments: Arguments, *, download: bool) -> nn.Module:
    weights: Any = torchvision.models.get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if not (download or cached.exists()):
        raise _no_weights(name, f"{cached} does not exist")
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=weights, **arguments)
    except (TypeError, ValueError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    except (OSError, RuntimeError) as error:  # no network; a damaged file
        raise _no_weights(name, str(error)) from error
    return model


def _no_weights(name: str, why: str) -> BadFileError:
    return BadFileError(
        f"model.pretrained: the weights of torchvision/{name} are not available: {why}; "
        "run `hpc-train prepare FILE` on a machine with network, or give a path"
    )


def _resampled(model: nn.Module, weights: StateDict) -> StateDict:
    """Resample the position embeddings of a ViT for another image size, like timm."""
    name = "encoder.pos_embedding"
    given, expected = weights.get(name), model.state_dict().get(name)
    if given is None or expected is None or given.dim() != 3 or given.shape == expected.shape:
        return weights
    side, given_side = (math.isqrt(tokens.shape[1] - 1) for tokens in (expected, given))
    if side**2 + 1 != expected.shape[1] or given_side**2 + 1 != given.shape[1]:
        return weights
    from timm.layers import resample_abs_pos_embed

    return weights | {name: resample_abs_pos_embed(given, [side, side], num_prefix_tokens=1)}


def _swap_head(model: nn.Module, num_classes: int) -> bool:
    """Replace the layer that produces the logits by a random one, unless it already has the right size."""
    name = head_name(model)
    assert name is not None, "every model of torchvision has a linear layer or a convolution"
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
