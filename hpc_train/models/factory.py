"""The user's own models: ``package.module:factory``, called as ``factory(num_classes=…, **args)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from torch import nn

from hpc_train.config.fields import Arguments
from hpc_train.config.training_sections import ModelConfig
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.models.arguments import parameter_names, takes, unknown_argument
from hpc_train.models.weights import load_weights
from hpc_train.registry import load

Factory = Callable[..., nn.Module]


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Call the factory ``rest``; it gets ``num_classes`` only if its signature takes it."""
    if config.pretrained is True:
        raise BadFileError(
            f"model.pretrained: true means a hub's weights, and {rest} has none; "
            "give a path, or load them in the factory"
        )
    make = cast(Factory, load("models", rest))
    if not callable(make):
        raise BadFileError(f"model.name: {rest} is a {type(make).__name__}; name a function or class to call")
    model = make(**_arguments(make, config, info))
    if isinstance(config.pretrained, str) and isinstance(model, nn.Module):
        load_weights(model, config.pretrained)
    return model


def _arguments(make: Factory, config: ModelConfig, info: DataInfo) -> Arguments:
    """Return the factory's arguments; checked before, so that its own TypeErrors are not hidden."""
    arguments = dict(config.args)
    if takes(make, "num_classes"):
        arguments.setdefault("num_classes", info.num_classes)
    for name in arguments:
        if not takes(make, name):
            raise unknown_argument(config, name, parameter_names(make))
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise BadFileError(f"model.args: {config.name}: {error}; write it there") from error
    return arguments
