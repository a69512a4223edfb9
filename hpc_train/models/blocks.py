"""The repeated blocks of a model: what is compiled, sharded and checkpointed as a unit.

Called by the worker between building and placing the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks in the order in which the model holds them; [] where it has none.

    A model class may say them itself by a method ``blocks()``. Otherwise a block's class has children,
    lies in nn.Sequential or nn.ModuleList, comes at least twice and holds at least half of all
    parameters; of several such classes (stages, their blocks) the one with the most instances.
    """
    # Looked up on the class: an attribute ``blocks`` that is an nn.Sequential can be called, too.
    if callable(method := getattr(type(model), "blocks", None)):
        return list(method(model))
    half = _num_parameters([model]) / 2
    candidates = [
        blocks for blocks in _by_class(model) if len(blocks) > 1 and _num_parameters(blocks) >= half
    ]
    return max(candidates, key=len, default=[])


def _by_class(model: nn.Module) -> list[list[nn.Module]]:
    """Return the elements of the model's containers, a list a class, none inside another of its list."""
    found: dict[type[nn.Module], list[nn.Module]] = {}
    inside: dict[type[nn.Module], set[nn.Module]] = {}
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for element in container:
            kind = type(element)
            # A Sequential's subclass (torchvision's Conv2dNormActivation) is a layer, not a block.
            if issubclass(kind, _CONTAINERS) or not any(element.children()):
                continue
            if element not in inside.setdefault(kind, set()):
                found.setdefault(kind, []).append(element)
                inside[kind].update(element.modules())
    return list(found.values())


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})
