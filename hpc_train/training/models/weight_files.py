"""Reads a file of weights without executing its code, whatever trainer wrote it.

Lightning, timm, torch hub and others store a state dict under a key of their own, beside other entries; its
names may contain those of wrappers (DDP, FSDP, torch.compile).
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.data_facts.root_layout import why_not_read

StateDict = dict[str, Tensor]

#: Keys of state dicts in files with several, in order of preference: EMA weights come first, as in timm.
_PREFERRED = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "params_ema", "teacher", "state_dict",
    "model_state_dict", "model_state", "model", "module", "net", "network", "params", "weights",
)  # fmt: skip
#: Keys of entries whose tensors are not weights.
_NO_WEIGHTS = ("optim", "sched", "scaler", "callback", "loop", "rng", "amp", "loss", "hyper")
#: Levels of dicts that are searched.
_MAX_DEPTH = 3
#: Parts of names that wrappers insert: torch.compile, FSDP, activation checkpointing, Fabric.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def read_weights(path: str, key: str) -> tuple[StateDict, str]:
    """Return the tensors in ``path`` on the CPU by name, and the file with what was selected or removed.

    The second is, for example, ``w.ckpt (state_dict_ema, without _orig_mod.)``. ``key``: the key of the
    experiment file that contains the path, for errors. Raises BadFileError.
    """
    if not Path(path).is_file():
        raise BadFileError(
            f"{key}: there is no file {path}; write true for the hub's weights, or an existing path"
        )
    if (why := why_not_read(Path(path))) is not None:
        raise BadFileError(f"{key}: {path} {why}; give another file")
    try:
        content: object = load_file(path) if _is_safetensors(path) else _read_pickled(path, key)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise BadFileError(
            f"{key}: {path} is damaged or not a file of weights: {error}; give another file"
        ) from error
    entry = _state_dict(content)
    if entry is None:
        raise BadFileError(
            f"{key}: {path} contains no state dict (names → tensors){_content(content)}; "
            "save the model's: torch.save(model.state_dict(), FILE)"
        )
    weights, keys = entry
    bare = {_without_wrappers(name): tensor for name, tensor in weights.items()}
    removed = sorted({part for name in weights for part in name.split(".")} & _WRAPPERS)
    notes = [".".join(keys), f"without {' and '.join(f'{part}.' for part in removed)}" if removed else ""]
    return bare, with_notes(path, notes)


def with_notes(source: str, notes: Iterable[str]) -> str:
    """Return ``source (first note, second note)``, without empty notes."""
    text = ", ".join(filter(None, notes))
    if not text:
        return source
    return f"{source[:-1]}, {text})" if source.endswith(")") else f"{source} ({text})"


def _is_safetensors(path: str) -> bool:
    """Return True for the suffix .safetensors, or content that starts with a length and JSON."""
    with Path(path).open("rb") as file:
        return path.endswith(".safetensors") or file.read(9)[8:] == b"{"


def _read_pickled(path: str, key: str) -> object:
    """Return the content, with an inert ``_Placeholder`` for each Python object (hyperparameters, args)."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            inert = [(_placeholder(name), name) for name in names]
            with torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
                return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError) as error:
        raise BadFileError(
            f"{key}: {path} is not a file of plain tensors: it is damaged, or contains Python objects, "
            "which could run code when loaded; save only the state_dict(), best as .safetensors"
        ) from error


class _Placeholder:
    """Replaces an object of any class: no code of that class is imported, its state is dropped."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _placeholder(name: str) -> type:
    """Return a class that is unpickled like ``name``, as a plain container if torch has to fill it."""
    word = "" if name.startswith("torch.") else name.lower()
    container = OrderedDict if word.endswith("dict") else list if word.endswith(("list", "deque")) else None

    def new(cls: type, *args: object, **kwargs: object) -> object:
        return object.__new__(cls) if container is None else container()

    return type("Placeholder", (_Placeholder,), {"__new__": new})


def _content(data: object) -> str:
    """Return what the file has instead of a state dict, as the end of a sentence."""
    values = [data, *data.values()] if isinstance(data, Mapping) else [data]
    if any(isinstance(value, _Placeholder) for value in values):
        return ", but a whole model or other Python objects"
    if isinstance(data, Mapping) and len(data) > 1:
        return f", but several entries: {', '.join(list(map(str, data))[:3])}"
    return ""


def _state_dict(data: object, depth: int = 0) -> tuple[StateDict, list[str]] | None:
    """Return the state dict in ``data`` and the keys that lead to it; None without exactly one to select."""
    if not isinstance(data, Mapping) or depth > _MAX_DEPTH:
        return None
    tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
    if tensors and all(isinstance(name, str) for name in data) and not any(map(_is_nested, data.values())):
        return tensors, []
    inner = {
        str(key): entry
        for key, value in data.items()
        if not str(key).startswith(_NO_WEIGHTS) and (entry := _state_dict(value, depth + 1))
    }
    key = next((name for name in _PREFERRED if name in inner), next(iter(inner), None))
    if key is None or (key not in _PREFERRED and len(inner) > 1):
        return None
    weights, keys = inner[key]
    return weights, [key, *keys]


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(part, Tensor | Mapping) for part in value.values())


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
