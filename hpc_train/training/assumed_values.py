"""Lets detectors run on tensors without data, by assumptions about what their code reads from tensors.

``training.memory_prediction`` runs ``task: detection`` under ``AssumedValues``. A detector selects anchors
and proposals by their values, so the sizes of its results depend on the data. Here each selection has its
maximum size; features take far more memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

#: Operators whose second argument may be masks.
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_MASKS = (torch.bool, torch.uint8)


class AssumedValues(TorchDispatchMode):
    """Answers what needs data, within FakeTensorMode.

    Comparisons are true of all elements, except that a tensor, whose elements are all equal, has the first
    number that it is compared with and no other. No box suppresses another. Of what Python reads,
    conditions are false and numbers 1. What code writes into a mask of zeros is counted, since samplers of
    proposals do so.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Mask → how many of its elements may be true; others may all be.
        self._true: Any = WeakIdKeyDictionary()
        #: Tensor → the number that all its elements equal.
        self._values: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not _is_without_data(args):
            return func(*args, **(kwargs or {}))
        if name == "nonzero":
            return _positions(self._count(args[0]), args[0].dim())
        if name == "nms":
            return _positions(args[0].shape[0])
        if name == "_unique2":
            return _distinct(args[0])
        if name in _INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if name != "_local_scalar_dense":
                raise
            return args[0].dtype != torch.bool
        self._note(name, args, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note how many elements of a result may be true, where that is known to be fewer than all."""
        if name in ("zeros", "zeros_like", "new_zeros"):
            self._true[result] = 0
        elif name == "index_fill_" and args[0] in self._true:
            self._true[args[0]] += args[2].numel()
        elif name == "index_put_" and args[0] in self._true and _selects_elements(args[0], args[1]):
            self._true[args[0]] += max(index.numel() for index in args[1])  # torch 2.11's for index_fill_
        elif name in ("bitwise_or", "__or__") and isinstance(args[1], Tensor):
            self._true[result] = self._count(args[0]) + self._count(args[1])
        elif name == "cat":
            self._true[result] = sum(self._count(part) for part in args[0])
        elif name == "eq" and not isinstance(args[1], Tensor):
            value = self._values.setdefault(args[0], args[1])
            self._true[result] = result.numel() if value == args[1] else 0
        elif args and isinstance(args[0], Tensor) and _shares_memory(args[0], result):
            # It was written to, or code may write to a view of it.
            self._true.pop(args[0], None)
            self._values.pop(args[0], None)

    def _count(self, mask: Tensor) -> int:
        return min(self._true.get(mask, mask.numel()), mask.numel())

    def _without_masks(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in _MASKS:
                found += [_positions(self._count(index))] * index.dim()
            else:
                found.append(index)
        return found


def _is_without_data(args: tuple[Any, ...]) -> bool:
    """Tell whether a tensor among the arguments is fake; those of a device mesh have data."""
    return not args or any(isinstance(each, FakeTensor) for each in tree_leaves(args))


def _shares_memory(tensor: Tensor, result: Any) -> bool:
    storages = [each.untyped_storage()._cdata for each in tree_leaves(result) if isinstance(each, Tensor)]
    return tensor.untyped_storage()._cdata in storages


def _selects_elements(tensor: Tensor, indices: list[Tensor | None]) -> bool:
    """Tell whether there is an index for each dimension, so that no whole rows are selected."""
    return len(indices) == tensor.dim() and all(index is not None for index in indices)


def _positions(count: int, *dims: int) -> Tensor:
    return torch.empty(count, *dims, dtype=torch.int64)


def _distinct(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return one distinct value, where it is, and how often."""
    return tensor.new_empty(1), torch.empty(tensor.shape, dtype=torch.int64), _positions(1)
