"""Loader processes and the process that they belong to: real ranks, real ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.training.datasets import workers
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.workers import WorkerLostError
from tests import warm
from tests.datasets.samples import CPU, experiment, random_split, source
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

RANK = """
import os, sys, time, torch
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.run import processes
from tests.datasets.samples import CPU, experiment, source

class Blocked:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if sys.argv[1] != "free":
            open(sys.argv[2]).read()  # a fifo that nobody writes to
        return torch.zeros(3, 4, 4, dtype=torch.uint8), 0

if sys.argv[1] == "slow to start":
    rank = os.getpid()
    die_with = processes.die_with
    def wait_for_its_end(parent):
        while os.getppid() == rank:
            time.sleep(0.01)
        die_with(parent)
    processes.die_with = wait_for_its_end
batches = training_batches(source(Blocked()), experiment(workers=2), Position(0), 1000, 0, 1, CPU)
print(*batches.stream.worker_pids, flush=True)
if sys.argv[1] != "free":
    time.sleep(600)
next(batches)
raise KeyError("the rank's own mistake")
"""


def start_rank(mode: str, fifo: Path) -> tuple[subprocess.Popen[str], list[int]]:
    os.mkfifo(fifo)
    rank = warm.start_script(
        RANK,
        mode,
        str(fifo),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert rank.stdout is not None
    return rank, [int(pid) for pid in rank.stdout.readline().split()]


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while (alive := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in alive:  # a test that fails leaves nothing behind
        os.kill(pid, signal.SIGKILL)
    assert not alive


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("mode", ["blocked", "slow to start"])
def test_workers_die_with_a_rank_that_is_killed(mode: str, tmp_path: Path) -> None:
    rank, pids = start_rank(mode, tmp_path / "fifo")
    assert len(pids) == 2
    rank.send_signal(signal.SIGKILL)
    wait_until_gone(pids, limit_s=HANG_LIMIT_S)
    rank.communicate(timeout=HANG_LIMIT_S)


def test_a_rank_that_fails_ends_at_once_and_leaves_no_worker(tmp_path: Path) -> None:
    rank, pids = start_rank("free", tmp_path / "fifo")
    _, errors = rank.communicate(timeout=HANG_LIMIT_S)
    assert rank.returncode == 1
    assert "the rank's own mistake" in errors
    wait_until_gone(pids, limit_s=HANG_LIMIT_S)


class Unreadable:
    """Says so in more words than fit into a pipe: a loader process waits in the middle of its message."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        raise ValueError("x" * 300_000)


@pytest.mark.fault(21)
@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_while_it_writes_is_noticed(workers: int) -> None:
    what = experiment(workers=workers)
    with training_batches(source(Unreadable()), what, Position(0), 1000, 0, 1, CPU) as batches:
        iterator = batches.stream._iterator
        assert iterator._data_queue._poll(60), "one writes"
        os.kill(batches.stream.worker_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=rf"pid {batches.stream.worker_pids[0]}, signal 9"):
            while True:
                with suppress(BadFileError):
                    next(batches)


def test_a_thread_that_pins_memory_and_waits_keeps_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch joins that thread without a limit; loader processes are killed then."""
    monkeypatch.setattr(workers, "_SHUTDOWN_LIMIT_S", 0.1)
    batches = training_batches(source(random_split(8)), experiment(), Position(0), 1000, 0, 1, CPU)
    device_is_done, killed = threading.Event(), []
    process = SimpleNamespace(is_alive=lambda: True, kill=lambda: killed.append(device_is_done.is_set()))
    stuck: Any = SimpleNamespace(
        _shutdown_workers=lambda: device_is_done.wait(HANG_LIMIT_S), _workers=[process]
    )
    batches.stream._iterator = stuck
    try:
        batches.close()
        assert killed == [False]
    finally:
        device_is_done.set()
