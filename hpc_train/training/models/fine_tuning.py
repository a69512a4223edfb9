"""Selects the trained parameters of a built model, as ``model.freeze`` and ``model.lora`` request.

Called by ranks and by ``prepare``, after weights were loaded and before the model is placed, so that every
strategy finds ``requires_grad`` as it will be. BatchNorm layers without trained parameters keep their running
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.models.lora import adapter_names, add_lora
from hpc_train.training.models.patterns import parameters_by_name, selected
from hpc_train.training.models.weights import report_of

_KEY = "model.freeze"


def prepare_for_training(model: nn.Module, config: ModelConfig) -> None:
    """Add adapters and freeze parameters as the file requests, in place.

    Raises BadFileError if a pattern matches nothing, or a random head would be frozen.
    """
    if config.lora is not None:
        add_lora(model, config.lora)
        keep_frozen_statistics(model)
        _refuse_frozen_random(model, "model.lora", "add '{layer}*' to also_train")
    if config.freeze:
        freeze(model, config.freeze)
        _refuse_frozen_random(model, "model.freeze", "exclude it by '!{layer}*'")


def _refuse_frozen_random(model: nn.Module, key: str, remedy: str) -> None:
    """Raise BadFileError if a frozen parameter, such as a new head, is missing in the loaded weights."""
    report, parameters = report_of(model), parameters_by_name(model)
    for name in report.missing if report else ():
        if name in parameters and not parameters[name].requires_grad:
            layer = name.rpartition(".")[0] or name
            raise BadFileError(
                f"{key}: {name} would be frozen at random values, since the loaded weights lack it; "
                f"{remedy.format(layer=layer)}"
            )


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
        are_trained = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
        if isinstance(layer, _BatchNorm) and are_trained and not any(are_trained):
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
