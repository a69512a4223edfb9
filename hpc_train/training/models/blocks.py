"""The repeated blocks of a model: the unit of compilation, sharding and activation checkpointing.

Also the depth of each parameter, for layer-wise learning rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


_KEY = "optimization.optimizer.layer_decay"


def layer_depths(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return name → depth of every parameter, 0 at the input; a shared parameter has its first name.

    The depths come from a method ``layer_depths()`` of the model's class; else from timm's ``group_matcher``,
    as in timm's own layer decay; else from the ``blocks``: 0 before the first, i + 1 in the i-th (from 0) and
    in the layers between it and the previous block, n + 1 after the last. Raises BadFileError if none of
    these exists.
    """
    names = [name for name, _ in model.named_parameters()]
    if callable(method := getattr(type(model), "layer_depths", None)):
        return _complete(method(model), names)
    if callable(matcher := getattr(model, "group_matcher", None)):
        from timm.models import group_parameters

        depths: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        deepest = max(depths.values(), default=0)  # timm: omitted parameters belong to the head
        return {name: depths.get(name, deepest) for name in names}
    if not blocks:
        raise BadFileError(
            f"{_KEY}: the layers of this model are unknown: it has no repeated blocks; take it out, or "
            "give the model a method layer_depths(), parameter's name → depth"
        )
    return _by_blocks(model, blocks)


def _complete(depths: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    missing = [name for name in names if name not in depths]
    if missing:
        raise BadFileError(
            f"{_KEY}: the model's layer_depths() omits {missing[0]}; it must name every parameter"
        )
    return {name: depths[name] for name in names}


def _by_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    in_block = {id(value): place for place, block in enumerate(blocks) for value in block.parameters()}
    depths: dict[str, int] = {}
    behind = 0  # blocks that have started
    for name, value in model.named_parameters():
        if id(value) in in_block:
            behind = max(behind, in_block[id(value)] + 1)
            depths[name] = in_block[id(value)] + 1
        else:
            # Layers between two blocks produce the next one's input.
            depths[name] = 0 if behind == 0 else behind + 1
    return depths
