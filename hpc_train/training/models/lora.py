"""``model.lora``: low-rank adapters of linear layers (Hu et al. 2021, arXiv:2106.09685).

A layer W becomes W + scale · B A, of which only A and B are trained. It stays the same module under the same
names, with two parameters more, so that files of weights, patterns, strategies and checkpoints see the plain
model; an adapter that wraps modules, such as peft's, would rename them all. ``merged`` converts back to plain
weights, for ``export``.

Legend: r rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import LoraConfig
from hpc_train.training.models.patterns import parameters_by_name, selected

_KEY = "model.lora"
A, B = "lora_a", "lora_b"


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
    chosen = selected(linears, config.targets, f"{_KEY}.targets", "linear layer")
    parameters = parameters_by_name(model)
    also_trained = selected(parameters, config.also_train, f"{_KEY}.also_train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in also_trained)
    for name in also_trained:  # a shared parameter has several names
        parameters[name].requires_grad_(True)
    for name in sorted(chosen):
        if reason := _refusal(model, name, linears[name]):
            raise BadFileError(
                f"{_KEY}.targets: {name} can't have an adapter: {reason}; exclude it by '!{name}'"
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
    """Return name → function that reads the tensor of a plain model, given the functions for a model with
    adapters.
    """
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
