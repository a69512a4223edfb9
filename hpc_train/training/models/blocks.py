"""The repeated blocks of a model: the unit of compilation, sharding and activation checkpointing.

Called between building and placing the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import nn

from hpc_train.errors import BadFileError

_T = TypeVar("_T")
_CONTAINERS = (nn.Sequential, nn.ModuleList)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks in the order in which the model contains them; [] if there are none.

    A model class may define them by a method ``blocks()``. Otherwise a block's class has children, is in an
    nn.Sequential or nn.ModuleList, occurs at least twice and contains at least half of all parameters; if
    several classes qualify (stages, their blocks), the class with the most instances is used. Raises
    BadFileError if the method returns modules that are not submodules, or that overlap.
    """
    if (defined := own_modules(model, "blocks")) is not None:
        _refuse_overlaps(model, defined)
        return defined
    half = _num_parameters([model]) / 2
    candidates = [
        blocks for blocks in _by_class(model) if len(blocks) > 1 and _num_parameters(blocks) >= half
    ]
    return max(candidates, key=len, default=[])


def own_modules(model: nn.Module, method: str) -> list[nn.Module] | None:
    """Return the submodules that ``method`` of the model's class returns; None if it has no such method.

    Raises BadFileError if it returns anything else.
    """
    modules = own_list(model, method, nn.Module, "a list of submodules, like list(self.layers)")
    submodules = set(model.modules()) - {model}
    for module in modules or ():
        if module not in submodules:
            kind = type(module).__name__
            raise BadFileError(
                f"model.name: {method}() returned a {kind} that is not one of its submodules; "
                "return those that __init__ created"
            )
    return modules


def own_list(model: nn.Module, method: str, kind: type[_T], remedy: str) -> list[_T] | None:
    """Return the list of ``kind`` that a method of the model's class returns; None without the method.

    Raises BadFileError if it returns anything else. ``remedy``: the expected value, for the message.
    """
    # Looked up on the class: an attribute ``blocks`` that is an nn.Sequential is callable, too.
    if not callable(function := getattr(type(model), method, None)):
        return None
    returned = function(model)
    description = "None" if returned is None else f"a {type(returned).__name__}"
    if isinstance(returned, Iterable) and not isinstance(returned, str):
        items = list(returned)
        strangers = [item for item in items if not isinstance(item, kind)]
        if not strangers:
            return items
        description = f"{description} with a {type(strangers[0]).__name__} in it"
    raise BadFileError(f"model.name: {method}() returned {description}; write {remedy}")


def _refuse_overlaps(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules()}
    inside = {inner: block for block in blocks for inner in block.modules() if inner is not block}
    for i, block in enumerate(blocks):
        reason = f"is inside {names[inside[block]]}" if block in inside else "is listed twice"
        if block in inside or block in blocks[:i]:
            raise BadFileError(f"model.name: blocks() returned {names[block]}, which {reason}; take one out")


def _by_class(model: nn.Module) -> list[list[nn.Module]]:
    """Return the elements of the model's containers, one list per class, none inside another of its list."""
    elements: dict[type[nn.Module], list[nn.Module]] = {}
    inside: dict[type[nn.Module], set[nn.Module]] = {}
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for element in container:
            kind = type(element)
            # A subclass of Sequential (torchvision's Conv2dNormActivation) is a layer, not a block.
            if issubclass(kind, _CONTAINERS) or not any(element.children()):
                continue
            if element not in inside.setdefault(kind, set()):
                elements.setdefault(kind, []).append(element)
                inside[kind].update(element.modules())
    return list(elements.values())


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})
