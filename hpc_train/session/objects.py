"""The state of a script's objects in a checkpoint: tensors as safetensors, the rest as JSON, no pickles.

``state-0.safetensors`` has the objects, as rank 0 has them, and its random number generators;
``state-<rank>.safetensors`` those of another rank, and its objects that differ between ranks. The file's
metadata describe what is not a tensor.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpc_train.errors import BadFileError
from hpc_train.session.positions import PositionedSampler
from hpc_train.training.checkpoint.shards import DTYPE_NAMES, Entry, write_safetensors

#: Key of a value that JSON has no notation for: its kind.
_KIND = "$"
_COMPILED = "_orig_mod."
_SHARDED = ("FullyShardedDataParallel", "DTensor", "ShardedTensor", "ZeroRedundancyOptimizer")
_DCP = "write it with torch.distributed.checkpoint into the folder of session.checkpoint"


class PerRank:
    """An object that differs between ranks. See ``session.per_rank``."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _split(objects: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the objects, and the names of those that differ between ranks."""
    names = [name for name, value in objects.items() if isinstance(value, PerRank)]
    return {name: value.value if name in names else value for name, value in objects.items()}, names


def check(objects: Mapping[str, Any]) -> None:
    """Raise TypeError for an object that can't be saved and restored in place."""
    for name, value in _split(objects)[0].items():
        sharded = next((kind for kind in _kinds(value) if kind in _SHARDED), None)
        if sharded:
            raise TypeError(f"session: {name} is sharded over the ranks ({sharded}); {_DCP}")
        has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not (has_state or isinstance(value, PositionedSampler | torch.Generator | dict | list)):
            remedy = f"put it into a dict, like counters={{{name!r}: …}}, which load_state changes in place"
            raise TypeError(f"session: {name} is a {type(value).__name__} without load_state_dict; {remedy}")


def _kinds(value: Any) -> Iterator[str]:
    parts = [value]
    if isinstance(value, nn.Module):
        parts += [*value.modules(), *value.parameters()]
    for part in parts:
        yield from (kind.__name__ for kind in type(part).__mro__)


def staged(step: int, objects: Mapping[str, Any], rank: int) -> Callable[[Path], None]:
    """Copy the state into memory; return the function that writes it into a folder."""
    copied = _Copied()
    values, per_rank = _split(objects)
    described: dict[str, Any] = {"step": step, "random": copied.plain(_random_state(), "random")}
    described["per_rank"] = per_rank
    described["objects"] = {
        name: copied.plain(_state_of(value, step), name)
        for name, value in values.items()
        if rank == 0 or name in per_rank
    }
    copied.sources.clear()
    metadata = {"format": "pt", "hpc_train": json.dumps(described)}

    def write(folder: Path) -> None:
        entries = {name: Entry.of(tensor) for name, tensor in copied.tensors.items()}
        write_safetensors(_file(folder, rank), entries, metadata)

    return write


def restore(folder: Path, objects: Mapping[str, Any], rank: int, ranks: int) -> int:
    """Restore the objects and this rank's generators from a checkpoint; return its step.

    Raises BadFileError if it was not written by ``save_state``, lacks an object, or has objects that differ
    between ranks and was written by another number of ranks.
    """
    saved = _read(folder, 0)
    own = saved if rank == 0 else _read(folder, rank) if _file(folder, rank).exists() else None
    values, per_rank = _split(objects)
    _check_per_rank(folder, values, per_rank, saved, ranks)
    for name, value in values.items():
        if name not in saved["objects"]:
            names = ", ".join(saved["objects"])
            raise BadFileError(
                f"session.load_state: {folder} has no {name}, only {names}; remove it from load_state, or "
                "start a new run with `hpc-train submit --new`"
            )
        of_rank = own if name in per_rank else saved
        assert of_rank is not None, "the checkpoint has as many ranks"
        _load(name, value, of_rank["objects"][name])

    def restore_random() -> None:
        if own is None:
            _seed_from(saved, rank)
        else:
            _restore_random(own["random"])

    restore_random()
    for value in values.values():
        if isinstance(value, PositionedSampler):
            # A loader draws a seed when a pass begins; the pass that was interrupted has done so before.
            value.on_resume = restore_random
    return int(saved["step"])


def _check_per_rank(
    folder: Path, values: Mapping[str, Any], per_rank: Sequence[str], saved: Mapping[str, Any], ranks: int
) -> None:
    """Raise BadFileError if an object is per rank only now, only at the save, or of other ranks."""
    before = saved.get("per_rank", ())
    for name in values.keys() & saved["objects"].keys():
        if (name in before) != (name in per_rank):
            was, now = ("", "not ") if name in before else ("not ", "")
            remedy = f"{'write' if name in before else 'omit'} session.per_rank for it"
            raise BadFileError(
                f"session.load_state: {name} is {now}per rank, but {was}in {folder}; {remedy}, or start a "
                "new run with `hpc-train submit --new`"
            )
    num_saved = len(list(folder.glob("state-*.safetensors")))
    if per_rank and num_saved != ranks:
        raise BadFileError(
            f"session.load_state: {per_rank[0]} differs between ranks, and {folder} has it for {num_saved} "
            f"ranks, not for {ranks}; resume on {num_saved} ranks, or remove it from load_state"
        )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"state-{rank}.safetensors"


def _read(folder: Path, rank: int) -> dict[str, Any]:
    path = _file(folder, rank)
    if not path.exists():
        raise BadFileError(
            f"session.load_state: {folder} was written within session.checkpoint; read it by session.latest"
        )
    with safe_open(path, "pt") as file:
        described = json.loads(file.metadata()["hpc_train"])
        return dict(_restored(described, file.get_tensor))


# Objects.


def _state_of(value: Any, step: int) -> Any:
    if isinstance(value, PositionedSampler):
        return {"step": step, **value.facts()}
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict | list):
        return value
    value = _unwrapped(value)
    state = value.state_dict()
    if isinstance(value, nn.Module):
        return {name.replace(_COMPILED, ""): entry for name, entry in state.items()}
    return state


def _load(name: str, value: Any, state: Any) -> None:
    if isinstance(value, PositionedSampler):
        step = state.pop("step")
        if state != value.facts():
            raise BadFileError(
                f"session.load_state: {name} has {value.facts()}, the checkpoint {state}: steps would have "
                "other samples; start a new run with `hpc-train submit --new`"
            )
        value.start_at(step)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, list):
        value[:] = state
    elif isinstance(value := _unwrapped(value), nn.Module):
        current = value.state_dict()  # with the versions of the modules
        names = {key.replace(_COMPILED, ""): key for key in current}
        current.update({names.get(key, key): entry for key, entry in state.items()})
        for key in names.keys() - state.keys():
            del current[names[key]]
        value.load_state_dict(current)
    else:
        value.load_state_dict(state)


def _unwrapped(value: Any) -> Any:
    while isinstance(value, nn.Module):
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(inner := getattr(value, "_orig_mod", None), nn.Module):
            value = inner
        else:
            break
    return value


# Random number generators.


def _random_state() -> dict[str, Any]:
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _seed_from(saved: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank that the checkpoint lacks by its step and rank 0's state."""
    digest = hashlib.sha256(saved["random"]["torch"].numpy().tobytes())
    digest.update(f"{saved['step']} {rank}".encode())
    seed = int.from_bytes(digest.digest()[:4], "big")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in saved["random"]:
        import numpy as np

        np.random.seed(seed)


# Values as JSON.


class _Copied:
    """Copies of tensors on the CPU, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        #: Memory, shape and dtype of a tensor → its name: tied weights are written once.
        self._names: dict[Any, str] = {}
        #: Tensors in use, so that none takes the memory of another one that was copied before.
        self.sources: list[Tensor] = []

    def plain(self, value: Any, name: str) -> Any:
        """Return the value for JSON, and copy its tensors. Raises TypeError if it has none."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, Mapping):
            if all(type(key) is str and key != _KIND for key in value):
                return {key: self.plain(entry, f"{name}.{key}") for key, entry in value.items()}
            items = [
                [self.plain(key, name), self.plain(entry, f"{name}.{key}")] for key, entry in value.items()
            ]
            return {_KIND: "dict", "items": items}
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.plain(entry, f"{name}.{index}") for index, entry in enumerate(value)]
            kind = next(kind for kind in _COLLECTIONS if isinstance(value, _COLLECTIONS[kind]))
            return items if kind == "list" else {_KIND: kind, "items": items}
        return self._other(value, name)

    def _other(self, value: Any, name: str) -> Any:
        if isinstance(value, bytes | bytearray):
            return {_KIND: "bytes", "text": base64.b64encode(value).decode("ascii")}
        if isinstance(value, torch.dtype | torch.device):
            return {_KIND: type(value).__name__, "text": str(value).removeprefix("torch.")}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype != object:
            text = base64.b64encode(value.tobytes()).decode("ascii")
            is_scalar = isinstance(value, numpy.generic)
            facts = {"dtype": value.dtype.str, "shape": value.shape, "scalar": is_scalar}
            return {_KIND: "numpy", "text": text, **facts}
        raise TypeError(
            f"session.save_state: {name} is a {type(value).__name__}, which can't be saved without pickle; "
            "keep numbers, text, lists, dicts and tensors in the state, or write it within session.checkpoint"
        )

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        if type(tensor).__name__ in _SHARDED:
            raise TypeError(f"session.save_state: {name} is sharded over the ranks; {_DCP}")
        if tensor.is_complex():
            parts = torch.view_as_real(tensor.detach().resolve_conj())
            return {_KIND: "complex", "parts": self._tensor(parts, name)}
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"session.save_state: {name} is a tensor of {tensor.layout}, {tensor.dtype}, which can't be "
                "saved as safetensors; write it within session.checkpoint"
            )
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() == 0 or place not in self._names:
            if name in self.tensors:  # as of {"a.b": …, "a": {"b": …}}
                name = f"{name} {len(self.tensors)}"
            self._names[place] = name
            self.sources.append(tensor)
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name] = copy.copy_(tensor.detach())
        return {_KIND: "tensor", "name": self._names[place]}


#: Kinds of collections; a named tuple becomes a tuple.
_COLLECTIONS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _restored(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return what ``_Copied.plain`` got."""
    if isinstance(value, list):
        return [_restored(entry, tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _restored(entry, tensor) for key, entry in value.items()}
    match value[_KIND]:
        case "tensor":
            return tensor(value["name"])
        case "complex":
            return torch.view_as_complex(_restored(value["parts"], tensor))
        case "dict":
            return {_restored(key, tensor): _restored(entry, tensor) for key, entry in value["items"]}
        case "bytes":
            return base64.b64decode(value["text"])
        case "dtype":
            return getattr(torch, value["text"])
        case "device":
            return torch.device(value["text"])
        case "numpy":
            import numpy as np

            data = np.frombuffer(base64.b64decode(value["text"]), np.dtype(value["dtype"]))
            array = data.reshape(value["shape"]).copy()
            return array[()] if value["scalar"] else array
        case kind:
            return _COLLECTIONS[kind](_restored(value["items"], tensor))
