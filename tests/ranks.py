"""Run a function on real gloo ranks: one spawned process each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Return ``function(rank, world_size, *args)`` of every rank; raise the first one's error.

    ``function`` must be importable, its result picklable. ``folder`` takes the rendezvous file.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    mp.spawn(_rank_main, (world_size, own, function, args), nprocs=world_size)
    return [torch.load(own / f"result-{rank}", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, world_size, *args), folder / f"result-{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
