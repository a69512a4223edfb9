"""``timm/<name>``: the models of timm, with its hub's weights or a file's."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
from timm.models import adapt_input_conv
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.validate.part_rules import not_an_argument, unlisted
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.base import (
    Preprocessing,
    no_preprocessing,
    no_weights,
    parameter_names,
    wrong_arguments,
)
from hpc_train.training.models.weights import StateDict, head_keys, hub_report, keep_report, load_weights

#: Arguments of timm.create_model that name files to read, or have separate keys.
_OWNED = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def listed_names() -> dict[str, list[str]]:
    """Return the names after ``timm/``."""
    return {"timm": timm.list_models()}


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build timm's model ``rest`` (``name`` or ``name.tag``) for the data set's classes and channels."""
    _refuse_unknown(rest)
    for name in _OWNED:
        if name in config.args:
            raise not_an_argument(("model", "args"), name, "model.pretrained").as_error()
    channels = {} if info.channels == 3 else {"in_chans": info.channels}
    arguments = {"num_classes": info.num_classes} | channels | config.args
    if config.pretrained is True:
        return _with_hub_weights(rest, config, arguments, download=download)
    model = _create(rest, config, arguments)
    if isinstance(config.pretrained, str):
        load_weights(model, config.pretrained, convert=convert_weights)
    return model


def _refuse_unknown(name: str) -> None:
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise unlisted(("model", "name"), "timm", "model", base, timm.list_models()).as_error()
    tags = sorted(full.partition(".")[2] for full in timm.list_models(f"{base}.*", pretrained=True))
    if tag and tag not in tags:
        raise BadFileError(
            f"model.name: timm's {base} has no weights {tag!r}; known: {', '.join(tags) or 'none'}"
        )


def _create(name: str, config: ModelConfig, arguments: Arguments) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    return model


def _known_arguments(name: str) -> list[str]:
    with torch.device("meta"):
        return parameter_names(type(timm.create_model(name)))


def _with_hub_weights(name: str, config: ModelConfig, arguments: Arguments, *, download: bool) -> nn.Module:
    try:
        with hub_access(download):
            refuse_uncached_url(name, download=download)
            model: nn.Module = timm.create_model(name, pretrained=True, **arguments)
    except TypeError as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(name)) from error
    except Exception as error:  # the hub client and the network raise many unrelated classes
        raise no_weights(f"timm/{name}", error) from error
    keep_report(model, hub_report(model, f"the hub (timm/{name})", _random_head(model), _resized(model)))
    return model


def preprocessing_of(rest: str, config: ModelConfig, *, download: bool) -> Preprocessing:
    """Return the preprocessing in timm's entry for the weights; the network is not used."""
    try:
        weights = timm.get_pretrained_cfg(rest)
    except RuntimeError:  # no such tag: building the model reports it
        weights = None
    if weights is None or not weights.has_weights:
        raise no_preprocessing(f"timm/{rest} has no pretrained weights that define mean and std")
    if weights.crop_mode != "center":
        raise no_preprocessing(
            f"the weights of timm/{rest} want crop_mode {weights.crop_mode}, and only center is supported"
        )
    return Preprocessing(
        list(weights.mean), list(weights.std), str(weights.interpolation), float(weights.crop_pct)
    )


def _random_head(model: nn.Module) -> set[str]:
    """Return the tensors that timm initialized randomly since the weights have another number of classes."""
    pretrained: Any = getattr(model, "pretrained_cfg", {})
    is_same = pretrained.get("num_classes") == getattr(model, "num_classes", None)
    return set() if is_same else head_keys(model)


def _resized(model: nn.Module) -> set[str]:
    """Return the tensors that timm converted to another number of channels or another image size."""
    pretrained: Any = getattr(model, "pretrained_cfg", {})
    channels, *size = pretrained.get("input_size", (3,))
    state = model.state_dict()
    resized = set()
    for name in _first_convolutions(model):
        weight = state.get(f"{name}.weight")
        if weight is not None and weight.dim() == 4 and weight.shape[1] != channels:
            resized.add(f"{name}.weight")
    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if "pos_embed" in state and own_size is not None and list(own_size) != size:
        resized.add("pos_embed")
    return resized


def hub_access(download: bool) -> AbstractContextManager[object]:
    """Without ``download``, make the hub's client use only its cache: it never waits for a network."""
    from huggingface_hub import constants

    # Equivalent to HF_HUB_OFFLINE=1; the client read that variable at its import, which timm has done.
    return nullcontext() if download else patch.object(constants, "HF_HUB_OFFLINE", True)


def refuse_uncached_url(name: str, *, download: bool) -> None:
    """Raise if timm would fetch a bare URL: torch.hub has no offline mode."""
    hub = timm.get_pretrained_cfg(name)
    if download or hub is None or hub.hf_hub_id or not hub.url:
        return
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(hub.url).name)
    if not cached.exists():
        raise FileNotFoundError(f"{cached} does not exist")


def convert_weights(model: nn.Module, weights: StateDict) -> StateDict:
    """Convert weights for other channels, and for another image or patch size, like timm does its own."""
    adapted = _adapt_channels(model, weights)
    expected, head = model.state_dict(), head_keys(model)
    misfits = {key for key in adapted.keys() & expected.keys() if adapted[key].shape != expected[key].shape}
    # timm's own function for a model's checkpoints. It resamples position embeddings.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or not misfits - head:
        return adapted
    try:
        return dict(convert(dict(adapted), model))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return adapted  # mismatches are then reported as in the file


def _first_convolutions(model: nn.Module) -> tuple[str, ...]:
    first = getattr(model, "pretrained_cfg", {}).get("first_conv")
    return (first,) if isinstance(first, str) else tuple(first or ())


def _adapt_channels(model: nn.Module, weights: StateDict) -> StateDict:
    """Convert the first convolution of weights for other channels, like timm does with its own."""
    adapted = dict(weights)
    for name in _first_convolutions(model):
        expected = model.state_dict().get(f"{name}.weight")
        weight = weights.get(f"{name}.weight")
        if expected is None or weight is None or weight.dim() != 4 or weight.shape[1] != 3:
            continue
        if expected.shape[1] != 3:
            adapted[f"{name}.weight"] = adapt_input_conv(expected.shape[1], weight)
    return adapted
