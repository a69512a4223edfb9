"""Structures of tensors: dicts, tuples, and lists if samples differ in shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hpc_train.errors import BadFileError

#: A batch's tensor (B, …), a list of B tensors, or a dict or tuple of these.
Tensors = Any


def map_tensors(
    function: Callable[[Tensor], Any], tensors: Tensors, of_list: Callable[[list[Tensor]], Any] | None = None
) -> Any:
    """Return the same structure with ``function`` of each tensor, and ``of_list``, if set, of each list."""
    if isinstance(tensors, dict):
        return {key: map_tensors(function, value, of_list) for key, value in tensors.items()}
    if isinstance(tensors, tuple):
        return tuple(map_tensors(function, value, of_list) for value in tensors)
    if isinstance(tensors, list):
        return of_list(tensors) if of_list else [function(tensor) for tensor in tensors]
    return tensors if tensors is None else function(tensors)


def tensors_of(tensors: Tensors) -> Iterator[Tensor]:
    """Yield the tensors of a structure, and each tensor of a list."""
    collected: list[Tensor] = []
    map_tensors(collected.append, tensors)
    yield from collected


def is_structured(tensors: Tensors) -> bool:
    """Return True for a structure, False for a tensor or a list of tensors."""
    return isinstance(tensors, (dict, tuple))


def collate(samples: Sequence[Any], stack: Callable[[Sequence[Tensor], str], Any], name: str = "") -> Tensors:
    """Return the samples' common structure with ``stack`` of its tensors and their name (``a.0``).

    Raises BadFileError if two samples differ in structure.
    """
    if not any(map(is_structured, samples)):
        return stack(samples, name)
    first = _keys(samples[0])
    for sample in samples:
        if _keys(sample) != first:
            raise BadFileError(
                f"data: samples of one batch have {_parts_text(first)} and {_parts_text(_keys(sample))}"
                f"{f' in {name}' if name else ''}; return the same structure for each sample"
            )
    prefix = f"{name}." if name else ""
    keys = list(samples[0]) if isinstance(samples[0], dict) else range(len(samples[0]))
    parts = {key: collate([sample[key] for sample in samples], stack, f"{prefix}{key}") for key in keys}
    return parts if isinstance(samples[0], dict) else tuple(parts.values())


def _keys(sample: Any) -> tuple[Any, ...] | None:
    """Return the keys or indices of a structure; None for a tensor."""
    if isinstance(sample, dict):
        return tuple(sorted(sample, key=str))
    return tuple(range(len(sample))) if isinstance(sample, tuple) else None


def _parts_text(keys: tuple[Any, ...] | None) -> str:
    if keys is None:
        return "a single tensor"
    return f"the parts {', '.join(map(str, keys))}" if keys else "no parts"
