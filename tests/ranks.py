"""Run a function on real gloo ranks: one process each, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What the fork server imports: there is one in each process of pytest.
IMPORTED = ["tests.preloaded"]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Return ``function(rank, world_size, *args)`` of every rank; raise the first one's error.

    ``function`` must be importable, its result picklable. ``folder`` takes the rendezvous file.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(  # type: ignore[no-untyped-call]
        _rank_main,
        (world_size, own, dict(os.environ), function, args),
        nprocs=world_size,
        start_method="forkserver",
    )
    return [torch.load(own / f"result-{rank}", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int,
    world_size: int,
    folder: Path,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    assert set(IMPORTED) <= sys.modules.keys(), "another fork server was started before"
    os.environ.clear()
    os.environ.update(environment)  # the server has that of the first test
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, world_size, *args), folder / f"result-{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
