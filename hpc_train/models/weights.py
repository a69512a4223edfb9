"""Weights from a file: read without running anything in it, matched by name, the head swapped."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc_train.errors import BadFileError

StateDict = dict[str, Tensor]

_KEY = "model.pretrained"
#: Where a .pth keeps the weights beside other things, by convention of timm and others.
_NESTED_UNDER = ("state_dict", "model")
#: What wrappers put before each name: DDP, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
#: Names that one message lists before it says how many more there are.
_MOST_NAMES = 5

_log = logging.getLogger(__name__)


def load_weights(
    model: nn.Module, path: str, *, convert: Callable[[StateDict], StateDict] = lambda weights: weights
) -> None:
    """Load the weights in the file ``path`` (.safetensors or a .pth of tensors) into ``model``.

    A head of another number of classes is left out and stays random; a notice in the log says which names.
    ``convert`` may change the weights before they are matched. Raises BadFileError where the file can't be
    read, names anything that the model has not, lacks something or has it in another shape.
    """
    weights = convert(read_weights(path))
    head = _head_keys(model)
    expected = model.state_dict()
    dropped = {key for key in head & weights.keys() if _other_classes(weights[key], expected[key])}
    kept = {key: value for key, value in weights.items() if key not in dropped}
    absent = {
        key for key in expected.keys() - kept.keys() if not key.endswith("num_batches_tracked")
    } - dropped
    _refuse_mismatch(path, kept, expected, absent)
    model.load_state_dict(kept, strict=False)
    if dropped:
        _log.warning("%s: %s has another number of classes; random: %s", _KEY, path, _listed(dropped))


def read_weights(path: str) -> StateDict:
    """Return the tensors in ``path`` under the names that a bare model has, on the CPU."""
    if not Path(path).is_file():
        raise BadFileError(
            f"{_KEY}: there is no file {path}; write true for the hub's weights, or a path that is"
        )
    try:
        found: object = load_file(path) if path.endswith(".safetensors") else _read_pickled(path)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise BadFileError(
            f"{_KEY}: {path} is damaged or no file of weights: {error}; give another"
        ) from error
    return {_bare(name): tensor for name, tensor in _tensors(path, found).items()}


def head_name(model: nn.Module) -> str | None:
    """Return the name of the layer that makes the logits: the last nn.Linear, else the last nn.Conv2d."""
    for kind in (nn.Linear, nn.Conv2d):
        names = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if names:
            return names[-1]
    return None


def _read_pickled(path: str) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadFileError(
            f"{_KEY}: {path} is no file of plain tensors: it is damaged, or holds Python objects, "
            "which could run code when read, so it is not; save the state_dict() alone, best as .safetensors"
        ) from error


def _tensors(path: str, found: object) -> StateDict:
    """Return the state dict in what a file held, which may lie one level down."""
    for key in _NESTED_UNDER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(_is_weight(k, v) for k, v in found.items()):
        raise BadFileError(
            f"{_KEY}: {path} holds no state dict (names → tensors); save the model's state_dict()"
        )
    return dict(found)


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def _bare(name: str) -> str:
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")  # blocks that were compiled one by one


def _head_keys(model: nn.Module) -> set[str]:
    """Return the names of the head's tensors; timm's models say their own heads."""
    timm_config: Any = getattr(model, "pretrained_cfg", None) or {}
    classifier = timm_config.get("classifier") or head_name(model) or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return {key for key in model.state_dict() if key.rpartition(".")[0] in names}


def _other_classes(found: Tensor, expected: Tensor) -> bool:
    return found.shape[1:] == expected.shape[1:] and found.shape[:1] != expected.shape[:1]


def _refuse_mismatch(path: str, kept: StateDict, expected: Mapping[str, Tensor], absent: set[str]) -> None:
    """Raise BadFileError that says every way in which the file is not this model's."""
    shapes = [
        f"{key} {tuple(value.shape)} instead of {tuple(expected[key].shape)}"
        for key, value in kept.items()
        if key in expected and value.shape != expected[key].shape
    ]
    unknown = kept.keys() - expected.keys()
    problems = [
        f"{what} {_listed(names)}"
        for what, names in (("lacks", absent), ("has besides", unknown), ("has in another shape", shapes))
        if names
    ]
    if problems:
        raise BadFileError(
            f"{_KEY}: {path} does not fit the model: it {'; it '.join(problems)}; "
            "give the weights of the same model.name and model.args"
        )


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return ", ".join(every[:_MOST_NAMES]) + more
