"""Builds an ``nn.Module`` on the CPU in float32 from the ``model:`` section."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.registry import is_factory, load, split_name
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.base import ModelBuilder, parameter_names, takes, unknown_argument
from hpc_train.training.models.weights import Converter, load_weights, unchanged

Factory = Callable[..., nn.Module]


def build_model(config: ModelConfig, info: DataInfo, *, download: bool = False) -> nn.Module:
    """Build the model that ``config`` names for the data set's classes and channels.

    Random weights come from torch's default generator: seed it before. Uses the network only with
    ``download``. Raises BadFileError if the file requests something that does not exist.
    """
    if is_factory(config.name):
        return _plain(build_by_factory(config, info), config)
    provider, rest = split_name(config.name)
    builder = cast(ModelBuilder, load("models", provider))
    return _plain(builder(rest, config, info, download=download), config)


def converter_of(name: str) -> Converter:
    """Return the function that converts weights to the shapes of the model ``name``.

    It is ``convert_weights`` of the module of the provider's builder, if defined.
    """
    builder = None if is_factory(name) else load("models", split_name(name)[0])
    module = sys.modules.get(getattr(builder, "__module__", ""))
    converter = getattr(module, "convert_weights", None)
    return unchanged if converter is None else cast(Converter, converter)


def _plain(model: object, config: ModelConfig) -> nn.Module:
    """Convert a plug-in's model to float32 and, unless it is on the meta device, move it to the CPU."""
    if not isinstance(model, nn.Module):
        raise BadFileError(
            f"model.name: {config.name} made a {type(model).__name__}; it must return an nn.Module"
        )
    _refuse_without_values(model, config)
    _refuse_aliases(model)
    if any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        model.cpu()
    if any(tensor.is_floating_point() and tensor.dtype != torch.float32 for tensor in model.parameters()):
        model.float()
    return model


def _refuse_without_values(model: nn.Module, config: ModelConfig) -> None:
    """Raise BadFileError for lazy layers, and for tensors on the meta device unless it is the default one."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if (name := next((name for name, value in tensors if is_lazy(value)), None)) is not None:
        raise BadFileError(
            f"model.name: {config.name} has a lazy layer: {name} has no shape until the first forward; give "
            "the layer its sizes (nn.Linear in place of nn.LazyLinear), or run one forward in the factory"
        )
    if torch.get_default_device().type == "meta":
        return
    if (name := next((name for name, value in tensors if value.device.type == "meta"), None)) is not None:
        raise BadFileError(
            f"model.name: {config.name} made {name} on the meta device, which has no values; make it on the "
            'CPU, or call to_empty(device="cpu") and set the values in the factory'
        )


def _refuse_aliases(model: nn.Module) -> None:
    """Raise BadFileError if two tensors of the state are in the same memory.

    A move to a GPU or a shard would separate them, and EMA and checkpoints copy them one after the other.
    """
    names: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or value.numel() == 0:
            continue
        place = value.untyped_storage()._cdata, value.storage_offset()  # fake tensors have no data_ptr
        first, other = names.setdefault(place, (name, value))
        if other is not value:
            raise BadFileError(
                f"model.name: {first} and {name} are two tensors in the same memory, which ends when the "
                f"model is moved to a GPU; share the parameter itself, without .data: {name} = {first}"
            )


def build_by_factory(config: ModelConfig, info: DataInfo) -> nn.Module:
    """Call ``package.module:factory`` as ``factory(num_classes=…, **args)``.

    It gets ``num_classes`` only if its signature takes it.
    """
    if config.pretrained is True:
        raise BadFileError(
            f"model.pretrained: true means a hub's weights, and {config.name} has none; "
            "give a path, or load them in the factory"
        )
    make = cast(Factory, load("models", config.name))
    if not callable(make):
        raise BadFileError(
            f"model.name: {config.name} is a {type(make).__name__}; name a function or class to call"
        )
    model = make(**_arguments(make, config, info))
    if isinstance(config.pretrained, str) and isinstance(model, nn.Module):
        _refuse_without_values(model, config)
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
