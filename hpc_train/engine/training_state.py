"""Model, its average, optimizer and scaler as named tensors and plain numbers, and back.

``engine.checkpoint`` calls it. Names are the unwrapped model's, whatever wraps it: ``model.<name>``,
``ema.<name>`` and ``optimizer.<parameter's name>.<key>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.engine.saved_tensors import SavedState, SavedTensor
from hpc_train.engine.shards import DTYPE_NAMES, DTYPES
from hpc_train.errors import BadFileError

MODEL = "model."
EMA = "ema."
OPTIMIZER = "optimizer."
_SHOWN = 5
#: What torch.compile puts into the names of a module that it wrapped.
_COMPILED = "_orig_mod"

#: ``Strategy.empty_like``.
EmptyLike = Callable[[tuple[int, ...], torch.dtype, Tensor | None], Tensor]


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of a rank; the objects themselves, which loading changes in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    #: ``Strategy.optimized`` where the optimizer holds something else than the model's own parameters.
    optimized: Mapping[str, Tensor] = field(default_factory=dict)
    #: ``Ema.averages``, by the model's names; none without EMA.
    averages: Mapping[str, Tensor] = field(default_factory=dict)

    def parameter_names(self, named: NamedTensors) -> dict[int, str]:
        """Return id of each tensor → its name, for what the optimizer refers to."""
        return {id(tensor): name for name, tensor in (*named.tensors.items(), *self.optimized.items())}


@dataclass(frozen=True)
class NamedTensors:
    """A model's parameters and persistent buffers under plain names; shared ones once."""

    tensors: dict[str, Tensor]
    #: A further name of a shared tensor → its first.
    tied: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> NamedTensors:
        """Name the tensors themselves, not copies; raises BadFileError where a module's state is none."""
        tensors: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        first_names: dict[int, str] = {}
        # state_dict also makes FSDP put parameters back that a forward pass left gathered.
        for name, value in _unwrapped(model).state_dict(keep_vars=True).items():
            plain = ".".join(part for part in name.split(".") if part != _COMPILED)
            if plain.endswith("_extra_state") or not isinstance(value, Tensor):
                raise BadFileError(
                    f"model.name: {plain} is no tensor and can't be saved; register it as a buffer"
                )
            first = first_names.setdefault(id(value), plain)
            if first == plain:
                tensors[plain] = value
            else:
                tied[plain] = first
        return cls(tensors, tied)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that DDP or torch.compile wrapped."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    compiled = model._modules.get(_COMPILED)
    return model if compiled is None else _unwrapped(compiled)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by full name."""
    found = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                name = f"{OPTIMIZER}{names[id(parameter)]}.{key}"
                _check_placing(name, value, parameter)
                found[name] = value
    return found


def _check_placing(name: str, value: Tensor, parameter: Tensor) -> None:
    # Nothing tells how to place it when it comes back.
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        raise BadFileError(
            f"optimization.optimizer.name: {name} is sharded but not shaped like its parameter, so it can't "
            "be saved; choose another optimizer, or parallel.strategy: ddp"
        )


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return what goes to JSON: parameters and values by group, keys and values of the state by parameter."""
    groups = [
        {"params": _group_names(group, names), **_describe_group(group, optimizer.defaults)}
        for group in optimizer.param_groups
    ]
    state = {names[id(parameter)]: _describe(values) for parameter, values in optimizer.state.items()}
    return {"groups": groups, "state": state}


def _group_names(group: dict[str, Any], names: Mapping[int, str]) -> list[str]:
    assert all(id(parameter) in names for parameter in group["params"]), "optimizer of another model"
    return [names[id(parameter)] for parameter in group["params"]]


def _describe_group(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the group's plain values; ``tensors``: which of them the optimizer keeps as a tensor → dtype."""
    given = {key: value for key, value in group.items() if key != "params"}
    counters = {key: value for key, value in given.items() if _is_counter(value)}
    plain = {key: _plain(value.item() if key in counters else value) for key, value in given.items()}
    _refuse(key for key, value in plain.items() if value is Ellipsis and _is_trained(key, defaults))
    return {
        "values": {key: value for key, value in plain.items() if value is not Ellipsis},
        "tensors": {key: DTYPE_NAMES[value.dtype] for key, value in counters.items()},
    }


def _is_counter(value: object) -> bool:
    """Tell whether a group's value is a number that the optimizer keeps as a tensor, as timm's Lamb does."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return value.dim() == 0 and value.device.type == "cpu" and value.dtype in DTYPE_NAMES


def _is_trained(key: str, given: Mapping[str, Any]) -> bool:
    """Tell whether training made a group's value, unlike those that ``given`` holds from the file."""
    return key == "step" or key not in given


def _describe(values: dict[str, Any]) -> dict[str, Any]:
    plain = {key: _plain(value) for key, value in values.items() if not isinstance(value, Tensor)}
    _refuse(key for key, value in plain.items() if value is Ellipsis)
    return {"tensors": sorted(values.keys() - plain.keys()), "values": plain}


def _refuse(odd: Iterable[str]) -> None:
    for key in sorted(odd):
        raise BadFileError(
            f"optimization.optimizer.name: its state {key!r} is neither tensor nor number, so it can't be "
            "saved; choose another optimizer"
        )


def _plain(value: object) -> Any:
    """Return ``value`` as JSON keeps it; Ellipsis where JSON can't."""
    if isinstance(value, float) and not math.isfinite(value):
        return Ellipsis
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return Ellipsis if Ellipsis in items else items
    return Ellipsis


def check_model(named: NamedTensors, saved: SavedState) -> None:
    """Raise BadFileError unless the checkpoint holds exactly this model's tensors."""
    held = {name: tensor for name, tensor in saved.tensors.items() if name.startswith(MODEL)}
    ours = {MODEL + name for name in (*named.tensors, *named.tied)}
    problems = [_mismatch(MODEL + name, tensor, saved) for name, tensor in named.tensors.items()]
    problems += [f"{name} is not in the model" for name in (*held, *saved.tied) if name not in ours]
    problems += [
        f"{MODEL + name} is shared with {MODEL + first} in the model alone"
        for name, first in named.tied.items()
        if saved.first_name(MODEL + name) != saved.first_name(MODEL + first)
    ]
    _raise_any("the model in the file is not the one in the checkpoint", problems)


def _mismatch(name: str, tensor: Tensor, saved: SavedState) -> str | None:
    found = saved.tensors.get(saved.first_name(name))
    if found is None:
        return f"{name} is missing in the checkpoint"
    theirs, ours = (
        f"{found.dtype} {list(found.shape)}",
        f"{DTYPE_NAMES.get(tensor.dtype)} {list(tensor.shape)}",
    )
    return None if theirs == ours else f"{name} is {theirs} in the checkpoint, {ours} in the model"


def check_averages(averages: Mapping[str, Tensor], saved: SavedState) -> None:
    """Raise BadFileError unless the checkpoint holds exactly these averages, or none where there are none."""
    held = {name for name in saved.tensors if name.startswith(EMA)}
    if bool(held) != bool(averages):
        has, has_not = ("checkpoint", "file") if held else ("file", "checkpoint")
        raise BadFileError(
            f"optimization.ema: the {has} has an average of the weights, the {has_not} none; "
            "resume with the file that the run began with"
        )
    problems = [_mismatch(EMA + name, tensor, saved) for name, tensor in averages.items()]
    problems += [f"{name} is not in the model" for name in sorted(held - {EMA + name for name in averages})]
    _raise_any("the average in the checkpoint is not this model's", problems)


def _raise_any(what: str, problems: Iterable[str | None]) -> None:
    lines = [problem for problem in problems if problem]
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise BadFileError(
            f"model: {what}; resume with the file that the run began with: "
            + "; ".join(lines[:_SHOWN] + more)
        )


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: SavedState) -> None:
    """Raise BadFileError unless the checkpoint has these parameter groups and no stray tensors."""
    saved_groups, listed = _saved_layout(saved)
    groups = [_group_names(group, names) for group in optimizer.param_groups]
    if groups != saved_groups:
        sizes, saved_sizes = ([len(group) for group in each] for each in (groups, saved_groups))
        raise BadFileError(
            "optimization.optimizer: its parameter groups are not the checkpoint's (parameters by group: "
            f"{sizes}, in the checkpoint {saved_sizes}); "
            "resume with the file that the run began with"
        )
    known = {name for group in groups for name in group}
    held = {name for name in saved.tensors if not name.startswith((MODEL, EMA))}
    problems = [f"{name} is not in the checkpoint's tensors" for name in sorted(listed - held)]
    problems += [f"{name} belongs to no parameter" for name in sorted(held - listed)]
    problems += [f"{name} is not optimised" for name in saved.optimizer["state"] if name not in known]
    _raise_any("the optimizer's state in the checkpoint does not fit it", problems)


def _saved_layout(saved: SavedState) -> tuple[list[list[str]], set[str]]:
    """Return the parameters' names by group and the full names of the state tensors."""
    try:
        groups = [(list(group["params"]), _saved_values(group)) for group in saved.optimizer["groups"]]
        states = {
            name: (list(e["tensors"]), dict(e["values"])) for name, e in saved.optimizer["state"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadFileError(f"state.json: optimizer is not as hpc-train writes it: {error!r}") from error
    listed = {f"{OPTIMIZER}{name}.{key}" for name, (keys, _) in states.items() for key in keys}
    return [names for names, _ in groups], listed


def _saved_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values, tensors again those that were."""
    values = dict(group["values"])
    dtypes = group.get("tensors", {})  # older checkpoints have none
    made = {key: torch.tensor(values[key], dtype=DTYPES[name], device="cpu") for key, name in dtypes.items()}
    if any(tensor.dim() for tensor in made.values()):
        raise ValueError(f"tensors of the group hold more than a number each: {sorted(made)}")
    return values | made


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: SavedState, empty_like: EmptyLike
) -> dict[str, Tensor]:
    """Give the optimizer the state that the checkpoint lists; return its tensors, not yet filled, by name.

    ``check_optimizer`` comes first. The groups' values stay the file's, but for what training added.
    """
    tensors = {}
    for group, entry in zip(optimizer.param_groups, saved.optimizer["groups"], strict=True):
        for parameter in group["params"]:
            described = saved.optimizer["state"].get(names[id(parameter)])
            optimizer.state.pop(parameter, None)
            if described is None:
                continue
            state: dict[str, Any] = dict(described["values"])
            for key in described["tensors"]:
                full = f"{OPTIMIZER}{names[id(parameter)]}.{key}"
                state[key] = tensors[full] = _make(key, saved.tensors[full], parameter, group, empty_like)
            optimizer.state[parameter] = state
        # Such as timm's Lamb, which counts its steps in the group.
        values = _saved_values(entry)
        group.update({key: value for key, value in values.items() if _is_trained(key, group)})
    return tensors


def _make(
    key: str, saved: SavedTensor, parameter: Tensor, group: dict[str, Any], empty_like: EmptyLike
) -> Tensor:
    is_counter = not saved.shape and (key == "step" or parameter.dim() > 0)
    if saved.shape == tuple(parameter.shape) and not is_counter:
        return empty_like(saved.shape, saved.torch_dtype, parameter)
    # torch's optimizers keep counters on the CPU unless their kernel needs them on the device.
    on_device = not is_counter or group.get("capturable") or group.get("fused")
    whole = empty_like(saved.shape, saved.torch_dtype, None)
    return whole.to(parameter.device if on_device else "cpu")
