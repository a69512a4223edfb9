"""Selects the trained parameters of a built model, as ``model.freeze`` and ``model.lora`` request.

Called by ranks and by ``prepare``, after weights were loaded and before the model is placed, so that every
strategy finds ``requires_grad`` as it will be. BatchNorm layers without trained parameters keep their running
statistics.

``model.lora`` adds low-rank adapters to linear layers (Hu et al. 2021, arXiv:2106.09685): a layer W becomes
W + scale · B A, of which only A and B are trained. It stays the same module under the same names, with two
parameters more, so that files of weights, patterns, strategies and checkpoints see the plain model; an
adapter that wraps modules, such as peft's, would rename them all. ``merged`` converts back to plain weights,
for ``export``.

Wherever the file names parameters or layers, shell patterns select them (``selected``): ``*`` any text, ``?``
a character, ``[…]`` a set.

Legend: r rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MethodType

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from hpc_train.errors import BadFileError, listed
from hpc_train.experiment.config.training_sections import LoraConfig, ModelConfig
from hpc_train.registry import nearest
from hpc_train.training.models.weights import report_of

_FREEZE, _LORA = "model.freeze", "model.lora"
#: Names of an adapter's parameters.
A, B = "lora_a", "lora_b"
#: Prefix of a pattern whose matches are excluded.
_NOT = "!"


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
    chosen = selected(names, patterns, _FREEZE)
    for name in chosen & parameters.keys():
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise BadFileError(f"{_FREEZE}: leaves no parameter to train; exclude some, as in ['*', '!head.*']")
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


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: (…, I) to (…, O)."""

    #: (r, I) and (O, r).
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        low_rank = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return functional.linear(inputs, self.weight, self.bias) + self.lora_scale * low_rank


def add_lora(model: nn.Module, config: LoraConfig) -> None:
    """Add adapters to the layers that match ``targets``, in place; freeze all but the adapters and
    ``also_train``.

    B is zero, so that the model's outputs do not change; A is drawn from torch's default generator. Raises
    BadFileError if a pattern matches nothing, or a layer can't have an adapter.
    """
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    chosen = selected(linears, config.targets, f"{_LORA}.targets", "linear layer")
    parameters = parameters_by_name(model)
    also_trained = selected(parameters, config.also_train, f"{_LORA}.also_train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in also_trained)
    for name in also_trained:  # a shared parameter has several names
        parameters[name].requires_grad_(True)
    for name in sorted(chosen):
        if reason := _refusal(model, name, linears[name]):
            raise BadFileError(
                f"{_LORA}.targets: {name} can't have an adapter: {reason}; exclude it by '!{name}'"
            )
        _adapt(linears[name], config)


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of the adapters' parameters."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, LoraLinear)]
    return {f"{name}.{key}".lstrip(".") for name in layers for key in (A, B)}


def scale_of(config: LoraConfig) -> float:
    """Return the factor of the adapters' product: alpha / r."""
    return 1.0 if config.alpha is None else config.alpha / config.rank


def merged(read: Mapping[str, Callable[[], Tensor]], scale: float) -> dict[str, Callable[[], Tensor]]:
    """Return name → function that reads the tensor of a plain model, given those for one with adapters."""
    suffix = f".{A}"
    adapted = {name.removesuffix(suffix) for name in read if name.endswith(suffix)}

    def reader(layer: str) -> Callable[[], Tensor]:
        weight, lora_a, lora_b = (read[f"{layer}.{key}"] for key in ("weight", A, B))
        return lambda: weight() + scale * (lora_b() @ lora_a())

    plain = {name: call for name, call in read.items() if not name.endswith((suffix, f".{B}"))}
    return plain | {f"{layer}.weight": reader(layer) for layer in adapted}


def _adapt(layer: nn.Linear, config: LoraConfig) -> None:
    # Changes the module itself, since others may refer to it, and hooks remain.
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.lora_a = nn.Parameter(layer.weight.new_empty(config.rank, layer.in_features))
    layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, config.rank))
    layer.lora_scale = scale_of(config)
    nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))


def _refusal(model: nn.Module, name: str, layer: nn.Linear) -> str | None:
    """Return why an adapter would not be called in place of this layer, or None."""
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, not an nn.Linear"
    names = [other for other, value in parameters_by_name(model).items() if value is layer.weight]
    if len(names) > 1:
        return f"its weight is shared ({', '.join(names)})"
    parent, _, child = name.rpartition(".")
    owner = type(model.get_submodule(parent))
    if f"{child}.weight" in _source(owner):
        return f"{owner.__name__} reads its weight without calling it"
    return None


def _source(owner: type[nn.Module]) -> str:
    try:
        return inspect.getsource(owner.forward)
    except (OSError, TypeError):  # code generated at run time
        return ""


def selected(names: Collection[str], patterns: Sequence[str], key: str, kind: str = "parameter") -> set[str]:
    """Return the names that match a pattern and no pattern starting with ``!``.

    Raises BadFileError, for the key of the file, if a pattern matches no name. ``kind``: of the named
    objects.
    """
    matches = {
        pattern: {name for name in names if fnmatchcase(name, pattern.removeprefix(_NOT))}
        for pattern in patterns
    }
    for pattern, matching in matches.items():
        if not matching:
            raise _matches_nothing(names, pattern, key, kind)
    included = [matching for pattern, matching in matches.items() if not pattern.startswith(_NOT)]
    excluded = [matching for pattern, matching in matches.items() if pattern.startswith(_NOT)]
    return set[str]().union(*included).difference(*excluded)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter; a shared parameter is listed under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _matches_nothing(names: Collection[str], pattern: str, key: str, kind: str) -> BadFileError:
    parts = [name.split(".") for name in names]
    parents = (".".join(part[:end]) for part in parts for end in range(1, len(part)))
    candidates = {*names, *(f"{parent}.*" for parent in parents)}
    close = nearest(pattern.removeprefix(_NOT), sorted(candidates))
    tops = sorted({name.partition(".")[0] for name in names})
    begin = f"their names begin with {listed(tops, 12) or 'nothing'}"
    remedy = f"did you mean '{close}'?" if close else begin
    return BadFileError(f"{key}: '{pattern}' matches no {kind} of the model; {remedy}")
