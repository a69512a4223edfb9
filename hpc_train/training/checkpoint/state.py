"""Converts model, EMA, optimizer and scaler to named tensors and plain numbers, and back.

``checkpoint.checkpointer`` calls it. Names are based on the unwrapped model: ``model.<name>``, ``ema.<name>``
and ``optimizer.<parameter's name>.<key>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.errors import BadFileError, HpcTrainError
from hpc_train.run.file_shapes import is_a
from hpc_train.training.checkpoint.saved_tensors import SavedState, SavedTensor
from hpc_train.training.checkpoint.shards import DTYPE_NAMES, DTYPES

MODEL = "model."
EMA = "ema."
OPTIMIZER = "optimizer."
#: Inserted by torch.compile into the names of a wrapped module.
_COMPILED = "_orig_mod"

DIFFERENT = "the ranks' models or optimizers hold different tensors; nothing was saved"

#: ``Strategy.empty_like``.
EmptyLike = Callable[[tuple[int, ...], torch.dtype, Tensor | None], Tensor]


@dataclass(frozen=True)
class TrainingState:
    """The objects of a rank's part of a checkpoint, which loading changes in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    #: ``Strategy.optimized`` if the optimizer has tensors other than the model's parameters.
    optimized: Mapping[str, Tensor] = field(default_factory=dict)
    #: ``Ema.averages``, by the model's names; empty without EMA.
    averages: Mapping[str, Tensor] = field(default_factory=dict)

    def parameter_names(self, named: NamedTensors) -> dict[int, str]:
        """Return id → name of each tensor that the optimizer may refer to."""
        return {id(tensor): name for name, tensor in (*named.tensors.items(), *self.optimized.items())}

    def weights(self, named: NamedTensors) -> dict[str, TensorRef]:
        """Return the model's tensors and their EMA by full name."""
        weights = {MODEL + name: TensorRef(tensor, tensor) for name, tensor in named.tensors.items()}
        averages = {
            EMA + name: TensorRef(value, named.tensors[name]) for name, value in self.averages.items()
        }
        return weights | averages


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a checkpoint, and the parameter or buffer to which it belongs."""

    tensor: Tensor
    like: Tensor


@dataclass(frozen=True)
class NamedTensors:
    """A model's parameters and persistent buffers under plain names; shared tensors once."""

    tensors: dict[str, Tensor]
    #: Alias of a shared tensor → its first name.
    tied: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> NamedTensors:
        """Name the tensors themselves, not copies; raises BadFileError for state that is not a tensor."""
        tensors: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        first_names: dict[int, str] = {}
        # state_dict also makes FSDP reshard parameters that are still gathered after a forward pass.
        for name, value in _unwrapped(model).state_dict(keep_vars=True).items():
            plain = ".".join(part for part in name.split(".") if part != _COMPILED)
            if plain.endswith("_extra_state") or not isinstance(value, Tensor):
                raise BadFileError(
                    f"model.name: {plain} is not a tensor and can't be saved; register it as a buffer"
                )
            first = first_names.setdefault(id(value), plain)
            if first == plain:
                tensors[plain] = value
            else:
                tied[plain] = first
        return cls(tensors, tied)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of DDP and torch.compile."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    compiled = model._modules.get(_COMPILED)
    return model if compiled is None else _unwrapped(compiled)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, TensorRef]:
    """Return the optimizer's state tensors by full name."""
    tensors = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                name = f"{OPTIMIZER}{names[id(parameter)]}.{key}"
                _check_placing(name, value, parameter)
                tensors[name] = TensorRef(value, parameter)
    return tensors


def _check_placing(name: str, value: Tensor, parameter: Tensor) -> None:
    # Its sharding would be unknown when it is loaded.
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        raise BadFileError(
            f"optimization.optimizer.name: {name} is sharded but not shaped like its parameter, so it can't "
            "be saved; choose another optimizer, or parallel.strategy: ddp"
        )


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return JSON values: parameters and values by group, keys and values of the state by parameter."""
    groups = [
        {"params": params, **_describe_group(group, optimizer.defaults)}
        for params, group in zip(group_names(optimizer, names), optimizer.param_groups, strict=True)
    ]
    state = {names[id(parameter)]: _describe(values) for parameter, values in optimizer.state.items()}
    return {"groups": groups, "state": state}


def group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the parameters' names by group."""
    groups = [group["params"] for group in optimizer.param_groups]
    assert all(id(parameter) in names for group in groups for parameter in group), (
        "optimizer of another model"
    )
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _describe_group(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the group's plain values; ``tensors``: dtypes of the values that are tensors."""
    options = {key: value for key, value in group.items() if key != "params"}
    counters = {key: value for key, value in options.items() if _is_counter(value)}
    plain = {key: _plain(value.item() if key in counters else value) for key, value in options.items()}
    _refuse(key for key, value in plain.items() if value is Ellipsis and _is_trained(key, defaults))
    return {
        "values": {key: value for key, value in plain.items() if value is not Ellipsis},
        "tensors": {key: DTYPE_NAMES[value.dtype] for key, value in counters.items()},
    }


def _is_counter(value: object) -> bool:
    """Return True if a group's value is a number in a tensor, like the step of timm's Lamb."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return value.dim() == 0 and value.device.type == "cpu" and value.dtype in DTYPE_NAMES


def _is_trained(key: str, options: Mapping[str, Any]) -> bool:
    """Return True if training created a group's value, which is then not in the file's ``options``."""
    return key == "step" or key not in options


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
    """Return ``value`` in JSON's types; Ellipsis if JSON can't represent it."""
    if isinstance(value, float) and not math.isfinite(value):
        return Ellipsis
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return Ellipsis if Ellipsis in items else items
    return Ellipsis


def united(parts: Mapping[int, Mapping[str, Any]], tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of ``state.json`` besides the tensors, combined from ranks with different tensors.

    ``parts``: rank → its ``tied`` and ``optimizer``; rank 0's entry is complete and takes precedence. Each
    group records its rank, because ranks have different groups. ``tensors``: names of all ranks' tensors.
    Raises HpcTrainError if ranks contradict each other.
    """
    if len(parts) == 1:
        return dict(parts[0])
    tied: dict[str, str] = {}
    state: dict[str, Any] = {}
    for part in parts.values():
        optimizer = part["optimizer"]
        names = [name for group in optimizer["groups"] for name in group["params"]]
        _add(tied, part["tied"])
        _add(state, {name: optimizer["state"].get(name) for name in names})
    if tied.keys() & set(tensors):
        raise HpcTrainError(DIFFERENT)
    groups = [
        {**group, "rank": rank} for rank, part in parts.items() for group in part["optimizer"]["groups"]
    ]
    described = {name: entry for name, entry in state.items() if entry is not None}
    return {**parts[0], "tied": tied, "optimizer": {"groups": groups, "state": described}}


def _add(merged: dict[str, Any], more: Mapping[str, Any]) -> None:
    if any(merged.setdefault(name, value) != value for name, value in more.items()):
        raise HpcTrainError(DIFFERENT)


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group in a checkpoint, of ``rank`` and of all ranks with the same tensors."""

    rank: int
    names: list[str]
    values: dict[str, Any]


def saved_groups(saved: SavedState) -> list[SavedGroup]:
    """Return the groups; raises BadFileError if they do not have the form of ``describe_optimizer``."""
    try:
        groups = [_saved_group(group) for group in saved.optimizer["groups"]]
        had = [(group.rank, name) for group in groups for name in group.names]
        if len(set(had)) != len(had):
            raise ValueError("a parameter is in two groups")
        return groups
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise not_ours(error) from error


def not_ours(error: Exception) -> BadFileError:
    """Return the error for a ``state.json`` that hpc-train did not write."""
    return BadFileError(f"state.json: optimizer is not as hpc-train writes it: {error!r}")


def _saved_group(group: dict[str, Any]) -> SavedGroup:
    rank, names = group.get("rank", 0), list(group["params"])
    if type(rank) is not int or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{rank!r} is not a rank, or a name is not text")
    return SavedGroup(rank, names, _saved_values(group))


def checked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's or a state's plain values. Raises ValueError if ``step`` is not a count."""
    step = values.get("step", 0)
    if not is_a(step, float) or step < 0:
        raise ValueError(f"step is {step!r:.40}")
    return dict(values)


def _saved_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values, with tensors restored."""
    values = checked_values(group["values"])
    dtypes = group["tensors"]
    tensors = {
        key: torch.tensor(values[key], dtype=DTYPES[name], device="cpu") for key, name in dtypes.items()
    }
    if any(tensor.dim() for tensor in tensors.values()):
        raise ValueError(f"tensors of the group have more than one element: {sorted(tensors)}")
    return values | tensors


@dataclass(frozen=True)
class NewOptimizerState:
    """A checkpoint's optimizer state in separate memory, which ``give`` passes to the optimizer."""

    #: Uninitialized tensors, by full name.
    tensors: dict[str, TensorRef]
    _states: dict[Tensor, dict[str, Any]]
    _group_values: list[dict[str, Any]]

    @classmethod
    def make(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        saved: SavedState,
        empty_like: EmptyLike,
    ) -> NewOptimizerState:
        """Allocate it, after ``checkpoint.matching``; does not change the optimizer."""
        new = cls({}, {}, [])
        values = {name: group.values for group in saved_groups(saved) for name in group.names}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                described = saved.optimizer["state"].get(names[id(parameter)])
                if described is None:
                    continue
                state: dict[str, Any] = dict(described["values"])
                for key in described["tensors"]:
                    full = f"{OPTIMIZER}{names[id(parameter)]}.{key}"
                    state[key] = _make(key, saved.tensors[full], parameter, group, empty_like)
                    new.tensors[full] = TensorRef(state[key], parameter)
                new._states[parameter] = state
            # For example timm's Lamb counts its steps in the group, equally for all groups on all ranks.
            theirs = values[names[id(group["params"][0])]] if group["params"] else {}
            new._group_values.append({key: value for key, value in theirs.items() if _is_trained(key, group)})
        return new

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state. In groups, replace only values that training created."""
        for group, values in zip(optimizer.param_groups, self._group_values, strict=True):
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
            group.update(values)
        optimizer.state.update(self._states)


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
