"""The depth of each parameter in a model, for layer-wise learning rates.

Called before the model is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hpc_train.errors import BadFileError

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
