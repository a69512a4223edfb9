"""Exact evaluation: each sample counts once, and the result is the same on any number of ranks.

The sums of every micro-batch stand in a row of their own of one table; ranks fill in their rows, the table
is summed over ranks (to zeros, so exactly) and then over rows, in an order that knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.runtime.data_info import Batch

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
    reports: bool = True,
) -> dict[str, float] | None:
    """Return the sums over the whole validation set, or None where ``must_stop`` ended it early.

    Collective: every rank passes equally many batches of its own. Each batch stands between ``begin``, which
    is told its place and starts to ask all ranks, and ``must_stop``, which says the same on all of them.
    None in place of a batch: it did not come before the rank was asked to stop. ``num_batches`` counts those
    of all ranks together; a batch numbered past it only fills up. ``reports``: one does of the ranks that
    share a model, and so have the same batches.
    """
    names: list[str] = []
    table = torch.empty(0)
    for place, batch in enumerate(batches):
        begin(place)
        sums = {} if batch is None else sums_of(batch)
        if must_stop():
            return None
        assert batch is not None, "a rank gives up only where all stop"
        if not names:
            names = list(sums)
            table = torch.zeros(num_batches, len(names), dtype=torch.float64, device=device)
        if reports and batch.number < num_batches:
            table[batch.number] = torch.stack([sums[name].to(torch.float64) for name in names])
    dist.all_reduce(table)
    return dict(zip(names, table.cpu().sum(0).tolist(), strict=True))
