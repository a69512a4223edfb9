"""Exact evaluation: each sample counts once, and the result is the same on any number of ranks.

Integer sums (counts, a confusion matrix) are exact in any order, and each rank adds up its own.
Floating-point sums have a row per micro-batch in one table; ranks fill in their rows, the table is summed
over ranks (to zeros, so exactly) and then over rows, in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.datasets.types import Batch

#: A batch → name → sum over its valid samples; shapes and dtypes are the same for every batch.
SumsOf = Callable[[Batch], dict[str, Tensor]]


class _Totals:
    """The sums of a rank's micro-batches: a row per batch of floating-point sums, one row of integers."""

    def __init__(self, like: dict[str, Tensor], num_batches: int, device: torch.device) -> None:
        self._shapes = {name: each.shape for name, each in like.items()}
        self._exact = [name for name, each in like.items() if not each.is_floating_point()]
        self._rounded = [name for name in like if name not in self._exact]
        self._counts = torch.zeros(self._size(self._exact), dtype=torch.int64, device=device)
        self._table = torch.zeros(num_batches, self._size(self._rounded), dtype=torch.float64, device=device)

    def add(self, batch: int, sums: dict[str, Tensor]) -> None:
        if self._exact:
            self._counts += torch.cat([sums[name].flatten().to(torch.int64) for name in self._exact])
        if self._rounded:
            values = [sums[name].flatten().to(torch.float64) for name in self._rounded]
            self._table[batch] = torch.cat(values)

    def result(self) -> dict[str, Any]:
        """Return name → the sum over all ranks, a number where its shape is (). Collective."""
        totals: dict[str, Any] = {}
        for names, table in ((self._exact, self._counts), (self._rounded, self._table)):
            if names:
                dist.all_reduce(table)
                # On the CPU: there the order of the addition is the same whatever computed the rows.
                total = table.cpu() if table is self._counts else table.cpu().sum(0)
                totals |= self._split(names, total)
        return {name: totals[name] for name in self._shapes}

    def _split(self, names: list[str], total: Tensor) -> dict[str, Any]:
        parts = total.split([self._shapes[name].numel() for name in names])
        shaped = {name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)}
        return {name: part.item() if part.dim() == 0 else part for name, part in shaped.items()}

    def _size(self, names: list[str]) -> int:
        return sum(self._shapes[name].numel() for name in names)


def evaluate(
    batches: Iterable[Batch | None],
    num_batches: int,
    sums_of: SumsOf,
    device: torch.device,
    begin: Callable[[int], None],
    must_stop: Callable[[], bool],
    *,
    owns_loss: bool = True,
) -> dict[str, Any] | None:
    """Return the sums over the whole validation set, or None where ``must_stop`` ended it early.

    Collective: every rank passes equally many batches of its own. ``begin`` receives a batch's place and
    starts to ask all ranks, ``must_stop`` says the same on all of them; the batch before is computed
    meanwhile. So a forward that is collective begins on all ranks or on none. None in place of a batch: it
    did not come before the rank was asked to stop. ``num_batches`` counts those of all ranks together; a
    batch numbered past it only fills up. ``owns_loss``: one does of the ranks that share a model, and so have
    the same batches.
    """
    totals: _Totals | None = None

    def count(batch: Batch) -> None:
        nonlocal totals
        sums = sums_of(batch)
        totals = totals or _Totals(sums, num_batches, device)
        if owns_loss and batch.number < num_batches:
            totals.add(batch.number, sums)

    agreed: Batch | None = None
    for place, batch in enumerate(batches):
        begin(place)
        if agreed is not None:
            count(agreed)
        if must_stop():
            return None
        assert batch is not None, "a rank gives up only where all stop"
        agreed = batch
    if agreed is not None:
        count(agreed)
    assert totals is not None, "a split without samples is refused"
    return totals.result()
