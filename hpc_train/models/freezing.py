"""``model.freeze``: parameters that are not trained, and BatchNorm layers that keep their running statistics.

Called between building and placing the model, so that every strategy finds ``requires_grad`` as it will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.errors import BadFileError
from hpc_train.models.lora import adapter_names
from hpc_train.models.patterns import parameters_by_name, selected

_KEY = "model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match; BatchNorm without trained parameters stays in evaluation mode.

    Patterns match the names of the model without adapters. A BatchNorm layer that has no parameters is named
    by its ``running_mean``. Raises BadFileError if a pattern matches nothing, or no parameter is trained.
    """
    parameters = parameters_by_name(model)
    statistics = {
        f"{name}.running_mean".lstrip("."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not any(True for _ in layer.parameters(recurse=False))
    }
    names = (parameters.keys() - adapter_names(model)) | statistics.keys()
    chosen = selected(names, patterns, _KEY)
    for name in chosen & parameters.keys():
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise BadFileError(f"{_KEY}: leaves no parameter to train; exclude some, as in ['*', '!head.*']")
    for name in chosen & statistics.keys():
        keep_in_evaluation(statistics[name])
    keep_frozen_statistics(model)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Keep each BatchNorm layer whose parameters are all frozen in evaluation mode."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and _is_frozen(layer):
            keep_in_evaluation(layer)


def keep_in_evaluation(layer: nn.Module) -> None:
    """Put ``layer`` in evaluation mode, which no ``train()`` of the model changes from then on."""
    layer.eval()
    # A bound method, which a deep copy of the layer binds to the copy.
    vars(layer)["train"] = MethodType(_stay, layer)


def is_kept_in_evaluation(layer: nn.Module) -> bool:
    """Return True if ``keep_in_evaluation`` was called with this layer."""
    return "train" in vars(layer)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def _is_frozen(layer: nn.Module) -> bool:
    parameters = list(layer.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
