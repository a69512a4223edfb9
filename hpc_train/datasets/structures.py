"""Structures of tensors: dicts, tuples, and lists where samples differ in shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hpc_train.errors import BadFileError

#: Of a batch: a tensor (B, …), a list of B tensors, or a dict or tuple of these.
Tensors = Any


def map_tensors(
    function: Callable[[Tensor], Any], tensors: Tensors, of_list: Callable[[list[Tensor]], Any] | None = None
) -> Any:
    """Return the same structure with ``function`` of each tensor, and ``of_list``, if given, of each list."""
    if isinstance(tensors, dict):
        return {key: map_tensors(function, value, of_list) for key, value in tensors.items()}
    if isinstance(tensors, tuple):
        return tuple(map_tensors(function, value, of_list) for value in tensors)
    if isinstance(tensors, list):
        return of_list(tensors) if of_list else [function(tensor) for tensor in tensors]
    return tensors if tensors is None else function(tensors)


def tensors_of(tensors: Tensors) -> Iterator[Tensor]:
    """Yield the tensors of a structure, those of a list one by one."""
    found: list[Tensor] = []
    map_tensors(found.append, tensors)
    yield from found


def is_structured(tensors: Tensors) -> bool:
    """Tell whether it is a structure rather than one tensor or a list of them."""
    return isinstance(tensors, (dict, tuple))


def collate(samples: Sequence[Any], stack: Callable[[Sequence[Tensor], str], Any], name: str = "") -> Tensors:
    """Return the samples' common structure with ``stack`` of its tensors and their name (``a.0``).

    Raises BadFileError where two samples are structured differently.
    """
    if not any(map(is_structured, samples)):
        return stack(samples, name)
    first = _keys(samples[0])
    for sample in samples:
        if _keys(sample) != first:
            raise BadFileError(
                f"data: samples of one batch have {_in_words(first)} and {_in_words(_keys(sample))}"
                f"{f' in {name}' if name else ''}; return the same structure for each sample"
            )
    prefix = f"{name}." if name else ""
    keys = list(samples[0]) if isinstance(samples[0], dict) else range(len(samples[0]))
    parts = {key: collate([sample[key] for sample in samples], stack, f"{prefix}{key}") for key in keys}
    return parts if isinstance(samples[0], dict) else tuple(parts.values())


def _keys(sample: Any) -> tuple[Any, ...] | None:
    """Return what a structure is indexed by; None of a tensor."""
    if isinstance(sample, dict):
        return tuple(sorted(sample, key=str))
    return tuple(range(len(sample))) if isinstance(sample, tuple) else None


def _in_words(keys: tuple[Any, ...] | None) -> str:
    if keys is None:
        return "a single tensor"
    return f"the parts {', '.join(map(str, keys))}" if keys else "no parts"
