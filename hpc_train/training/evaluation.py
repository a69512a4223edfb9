"""Exact evaluation: each sample counts once, and the result is the same on any number of ranks.

The sums of every micro-batch are in a row of their own of one table; ranks fill in their rows, the table
is summed over ranks (to zeros, so exactly) and then over rows, in an order that knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.datasets.types import Batch

#: A batch → name → sum over its valid samples, shape (), float64.
SumsOf = Callable[[Batch], dict[str, Tensor]]


def evaluate(
    batches: Iterable[Batch | None],
    num_batches: int,
    sums_of: SumsOf,
    device: torch.device,
    begin: Callable[[int], None],
    must_stop: Callable[[], bool],
    *,
    owns_loss: bool = True,
) -> dict[str, float] | None:
    """Return the sums over the whole validation set, or None where ``must_stop`` ended it early.

    Collective: every rank passes equally many batches of its own. ``begin`` receives a batch's place and
    starts to ask all ranks, ``must_stop`` says the same on all of them; the batch before is computed
    meanwhile. So a forward that is collective begins on all ranks or on none. None in place of a batch: it
    did not come before the rank was asked to stop. ``num_batches`` counts those of all ranks together; a
    batch numbered past it only fills up. ``owns_loss``: one does of the ranks that share a model, and so have
    the same batches.
    """
    names: list[str] = []
    table = torch.empty(0)

    def count(batch: Batch) -> None:
        nonlocal names, table
        sums = sums_of(batch)
        if not names:
            names = list(sums)
            table = torch.zeros(num_batches, len(names), dtype=torch.float64, device=device)
        if owns_loss and batch.number < num_batches:
            table[batch.number] = torch.stack([sums[name].to(torch.float64) for name in names])

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
    dist.all_reduce(table)
    return dict(zip(names, table.cpu().sum(0).tolist(), strict=True))
