"""Run a function on real gloo ranks: one process each, forked from a server that has imported torch.

The server is that of multiprocessing, itself forked from the one of tests/warm.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import warm

#: What the fork server imports: there is one in each process of pytest.
IMPORTED = ["tests.preloaded"]


def start_fork_server() -> None:
    """Start this process's fork server unless it runs."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork_warm):
        forkserver.ensure_running()


def _fork_warm(program: bytes, arguments: Sequence[str], ends: Sequence[int]) -> int:
    """Run ``python -c``, whose script names the numbers of two files, in a fork; return its process."""
    called = "main({}, {}, ".format(*ends)
    assert called in arguments[-1]
    moved = "import os; ends = os.dup(0), os.dup(1); os.dup2(2, 1); "
    script = moved + arguments[-1].replace(called, "main(*ends, ")
    process = warm.start_script(script, stdin=ends[0], stdout=ends[1], cwd=Path(__file__).parents[1])
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Return ``function(rank, world_size, *args)`` of every rank; raise the first one's error.

    ``function`` must be importable, its result picklable. ``folder`` takes the rendezvous file.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    start_fork_server()
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
    assert set(IMPORTED) <= sys.modules.keys(), "the fork server could not import them"
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
