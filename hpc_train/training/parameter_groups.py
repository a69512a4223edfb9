"""The optimizer's parameter groups: learning rate and weight decay by layer and by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpc_train.config.training_sections import OptimizerConfig
from hpc_train.models.patterns import parameters_by_name, selected

_KEY = "optimization.optimizer.groups"


def matched_groups(config: OptimizerConfig, model: nn.Module) -> dict[str, int]:
    """Return name → index in ``groups`` of each trained parameter that matches a pattern.

    A shared parameter is matched by its first name. ``model``: whole, before it is placed. Raises
    BadFileError if a pattern matches no trained parameter.
    """
    trained = {name: value for name, value in parameters_by_name(model).items() if value.requires_grad}
    first_names = {id(value): name for name, value in reversed(trained.items())}
    found: dict[str, int] = {}
    for index, group in enumerate(config.groups):
        names = selected(trained, group.match, f"{_KEY}[{index}].match", "trained parameter")
        for name in names:
            found.setdefault(first_names[id(trained[name])], index)
    return found


def parameter_groups(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    depths: Mapping[str, int] | None = None,
    matched: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return one group per layer and entry of ``groups``; with ``decay_norm_and_bias: false`` two, with and
    without weight decay.

    ``depths``: each parameter's depth (``models.depths``) if layers have their own rates, else None;
    ``matched``: the result of ``matched_groups``. Ranks with the same parameters get the same groups in the
    same order, the last layers first: their rate is ``lr`` itself.
    """
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    if not depths and not matched:
        return _by_decay(config, list(trained.values()))
    deepest = max(depths.values()) if depths else 0
    by_place: dict[tuple[int, int], list[nn.Parameter]] = {}
    for name, value in trained.items():
        levels_below = deepest - depths[name] if depths else 0
        place = levels_below, (matched or {}).get(name, len(config.groups))
        by_place.setdefault(place, []).append(value)
    groups: list[dict[str, Any]] = []
    for (levels_below, index), values in sorted(by_place.items(), key=lambda item: item[0]):
        settings = _settings(config, lr, levels_below, index)
        groups += [settings | group for group in _by_decay(config, values)]
    return groups


def _settings(config: OptimizerConfig, lr: float, levels_below: int, index: int) -> dict[str, Any]:
    """Return a group's values; ``index`` is that in ``groups``, or their number if none matches."""
    rate = lr if config.layer_decay is None else lr * config.layer_decay**levels_below
    if index == len(config.groups):
        return {"lr": rate}
    group = config.groups[index]
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return {"lr": rate * group.lr_factor} | decay


def _by_decay(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    if config.decay_norm_and_bias:
        return [{"params": parameters}]
    decayed = [value for value in parameters if value.dim() >= 2]
    others = [value for value in parameters if value.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
