"""The mean of a bucket of gradients over the ranks of one node, in shared memory and by gloo.

    python -m benchmarks.node_sum [--rounds 7] [--quick]

What DDP does in each backward on the CPU. Shared memory is what ``strategies.ddp`` uses on one node, gloo
what DDP uses by itself; both divide each rank's values first. Ranks are processes with one thread each, and
all have the data at the same time. Writes benchmarks/results/node_sum.json.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.measuring import cannot_run, comparison, conditions, parser, report, rounds_of
from hpc_train.rank.network import loopback_interface
from hpc_train.training.distributed.shared_flags import open_shared_sum

GLOO, SHARED = "gloo", "shared memory"
#: Ranks and MiB: a small model's gradients, and one bucket of DDP.
SIZES = ((2, 0.25), (2, 25), (4, 0.25), (4, 25), (8, 0.25), (8, 25))
#: How long each timing takes about, and how many means it has at least.
_TIMING_S, _MIN_MEANS = 0.3, 3


def main() -> None:
    arguments = parser(__doc__).parse_args()
    measured_with = conditions() | {"threads of each rank": 1}
    compared = []
    for ranks, mib in SIZES[:2] if arguments.quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, mib, rounds_of(arguments), folder), nprocs=ranks)  # type: ignore[no-untyped-call]
            values = json.loads((Path(folder) / "values").read_text(encoding="utf-8"))
        if SHARED not in values:
            cannot_run("ranks can't share memory on this machine")
        title = f"Mean of {mib:g} MiB over {ranks} ranks of a node"
        compared.append(comparison(title, "seconds", values, GLOO))
    report("node_sum", arguments, measured_with, compared)


def _rank(rank: int, ranks: int, mib: float, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    data = torch.rand(int(mib * 2**20) // 4)
    arms: dict[str, Callable[[Tensor], object]] = {GLOO: partial(_by_gloo, ranks)}
    shared = open_shared_sum(rank, ranks, dist.group.WORLD, silence_s=60.0)
    if shared is not None:
        arms[SHARED] = shared.average
    counts = {name: _count(arm, data) for name, arm in arms.items()}
    values: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in order.sample(list(arms), len(arms)):
            values[name].append(_seconds(arms[name], data, counts[name]))
    if rank == 0:
        (Path(folder) / "values").write_text(json.dumps(values), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _by_gloo(ranks: int, data: Tensor) -> None:
    data.mul_(1 / ranks)
    dist.all_reduce(data)


def _count(mean: Callable[[Tensor], object], data: Tensor) -> int:
    """Return how many means a timing has, the same on all ranks."""
    _seconds(mean, data, 1)
    taken_s = torch.tensor(_seconds(mean, data, _MIN_MEANS))
    dist.all_reduce(taken_s, dist.ReduceOp.MAX)
    return max(_MIN_MEANS, round(_TIMING_S / taken_s.item()))


def _seconds(mean: Callable[[Tensor], object], data: Tensor, count: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        mean(data)
    dist.barrier()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
