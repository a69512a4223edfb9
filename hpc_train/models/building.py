"""Builds an ``nn.Module`` on the CPU in float32 from the ``model:`` section."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hpc_train.config.training_sections import ModelConfig
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.models import factory
from hpc_train.models.base import ModelBuilder
from hpc_train.registry import is_factory, load, split_name


def build_model(config: ModelConfig, info: DataInfo, *, download: bool = False) -> nn.Module:
    """Build the model that ``config`` names for the data set's classes and channels.

    Random weights come from torch's default generator: seed it before. Uses the network only with
    ``download``. Raises BadFileError if the file requests something that does not exist.
    """
    if is_factory(config.name):
        return _plain(factory.build(config.name, config, info, download=download), config)
    provider, rest = split_name(config.name)
    builder = cast(ModelBuilder, load("models", provider))
    return _plain(builder(rest, config, info, download=download), config)


def _plain(model: object, config: ModelConfig) -> nn.Module:
    """Convert a plug-in's model to float32 and, unless it was built on the meta device, move it to
    the CPU.
    """
    if not isinstance(model, nn.Module):
        raise BadFileError(
            f"model.name: {config.name} made a {type(model).__name__}; it must return an nn.Module"
        )
    if any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        model.cpu()
    if any(tensor.is_floating_point() and tensor.dtype != torch.float32 for tensor in model.parameters()):
        model.float()
    return model
