"""The process group of all ranks.

Ranks ``meet`` at the store (``rendezvous``), then each starts its watchdog, then ``make_group`` connects
them. The control group is gloo's, because a second group of all ranks would cost another socket per peer; two
threads use it: the training thread by collectives, the thread that writes a checkpoint point to point
(``checkpoint.control_group``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from hpc_train.errors import PeerLostError, TryAgainError
from hpc_train.rank import network, signals
from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed import backends, timed_call
from hpc_train.training.distributed.backends import connection_faults_named
from hpc_train.training.distributed.rendezvous import DEFAULT_TIMEOUTS, Rendezvous, Timeouts, meet
from hpc_train.training.distributed.shared_flags import (
    SharedFlags,
    SharedSum,
    open_shared_flags,
    open_shared_sum,
)

#: Assumed: time for which a rank with a stop signal waits for the others to connect; usually a moment.
_CONNECT_LIMIT_S = 10.0
#: For tests with several ranks on one GPU, which NCCL refuses: ``gloo``.
_TEST_CUDA_BACKEND = "HPC_TRAIN_TEST_CUDA_BACKEND"
#: Read by torch when a gloo group is created.
_LAZY = "TORCH_GLOO_LAZY_INIT"
#: Timeout of groups, by the default group that ``make_group`` created last.
_timeouts: dict[dist.ProcessGroup | None, timedelta] = {}
#: Interval at which a rank inside torch checks for a stop signal.
_POLL_S = 0.1


@dataclass(frozen=True)
class Group:
    """The process group of all ranks, and the group for control messages.

    ``control`` is the only gloo group of all ranks besides the backend's. It connects a rank only to the
    peers that it sends to, at most 2 + log2(ranks).
    The training thread runs collectives on it; the thread that writes checkpoints sends point to point
    (``checkpoint.control_group``). ``store`` is the rendezvous store, over a separate connection, for use by
    one thread.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    store: c10d.Store
    timeouts: Timeouts
    #: Memory for the exchange at each step, if all ranks are on one node.
    shared_flags: SharedFlags | None = None

    def connect(self) -> None:
        """Run a first collective on the device's backend, in which NCCL connects the ranks. Collective.

        Raises NetworkFaultError if this node can't connect, PeerLostError if a peer does not.
        """
        with connection_faults_named():
            _in_thread(self._sum, self.device, self.timeouts.join_s)

    def _sum(self) -> None:
        total = torch.ones(1, device=self.device)
        dist.all_reduce(total)
        total.item()  # NCCL connects some of its channels on the device's stream

    def open_shared_sum(self) -> SharedSum | None:
        """Return an average over the ranks in shared memory; None on all without it. Collective."""
        if self.shared_flags is None or self.device.type != "cpu":
            return None
        return open_shared_sum(self.rank, self.world_size, self.control, self.timeouts.silence_s)

    def wait_to_leave(self) -> None:
        """Wait, for a limited time, until all ranks arrive: if one exits, Slurm ends the others.

        Never raises: the work is done.
        """
        if self.world_size > 1:
            with contextlib.suppress(Exception):
                _set_timeout(timedelta(seconds=self.timeouts.leave_s), self.control)
                dist.all_reduce(torch.zeros(1), group=self.control)

    def leave(self) -> None:
        """Destroy the groups, or give up after a limit. Never raises: the work is done or already lost."""
        timed_call.within(self.timeouts.teardown_s, self._destroy, "leaving")

    def _destroy(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread starts with device 0
        dist.destroy_process_group()


def join(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    *,
    must_stop: Callable[[], bool] = lambda: False,
) -> Group:
    """Form the process group of all ranks: ``meet``, then ``make_group``. Collective."""
    meeting = meet(facts, device, rendezvous, token, timeouts, must_stop=must_stop)
    return make_group(facts, device, meeting, timeouts, must_stop=must_stop)


def make_group(
    facts: RankFacts,
    device: torch.device,
    meeting: Rendezvous,
    timeouts: Timeouts,
    *,
    must_stop: Callable[[], bool],
) -> Group:
    """Create the process group of the ranks that have met. Collective.

    Torch connects the ranks in C++, where no signal handler runs, and therefore in a thread. When this
    returns, all ranks have connected their control groups, and any may leave. Raises like ``Group.connect``,
    and TryAgainError if stopped.
    """
    # With NCCL the default group has a gloo group for CPU tensors, which training does not use.
    has_own_gloo = device.type == "cuda"
    arguments: dict[str, Any] = {}
    backend = os.environ.get(_TEST_CUDA_BACKEND, "nccl")
    if has_own_gloo and backend == "nccl":
        arguments = backends.prepare(device, os.environ)
    make = partial(
        dist.init_process_group,
        f"cpu:gloo,cuda:{backend}" if has_own_gloo else "gloo",
        store=meeting.store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timedelta(seconds=timeouts.join_s),
        **arguments,
    )
    with connection_faults_named(), _connecting_at_first_use() if has_own_gloo else contextlib.nullcontext():
        _in_thread(make, device, timeouts.join_s, must_stop)
    timeout = timedelta(seconds=timeouts.silence_s)
    _set_timeout(timeout, None)
    _timeouts.clear()
    _timeouts[dist.group.WORLD] = timeout
    with connection_faults_named(), _connecting_at_first_use():
        control = dist.group.WORLD if has_own_gloo else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    _wait_until_connected(control, timeouts.join_s, must_stop)
    flags = None
    if facts.num_nodes == 1 and facts.world_size > 1:
        flags = open_shared_flags(facts.rank, facts.world_size, control, timeouts.silence_s)
    return Group(facts.rank, facts.world_size, device, control, meeting.own_store, timeouts, flags)


def _in_thread(
    function: Callable[[], None],
    device: torch.device,
    limit_s: float,
    must_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run ``function``, which may block in C++; abandon it if this rank receives a stop signal."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts with device 0
            function()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="connecting", daemon=True)
    with signals.blocked():  # stop signals must reach the main thread
        thread.start()
    _Wait(_joins(thread), limit_s, must_stop).until(result.done)
    result.result()


def _joins(thread: threading.Thread) -> Iterator[None]:
    while True:
        thread.join(_POLL_S)
        yield


@contextlib.contextmanager
def _connecting_at_first_use() -> Iterator[None]:
    """Have gloo connect two ranks of a group created in the context once one sends to the other."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY]
        if before is not None:
            os.environ[_LAZY] = before


class _Wait:
    """Waits with a common limit, and a shorter limit after a stop signal of this rank."""

    def __init__(self, polls: Iterator[None], limit_s: float, must_stop: Callable[[], bool]) -> None:
        self._polls, self._limit_s, self._must_stop = polls, limit_s, must_stop
        self._stop_at, self._end_at = float("inf"), time.monotonic() + limit_s

    def until(self, is_done: Callable[[], bool]) -> None:
        """Return once ``is_done``. Raises TryAgainError if stopped, PeerLostError after the limit."""
        for _ in self._polls:
            if is_done():
                return
            at = time.monotonic()
            if self._must_stop():
                self._stop_at = min(self._stop_at, at + _CONNECT_LIMIT_S)
            if at >= self._stop_at:
                raise TryAgainError("stopped before training began")
            if at >= self._end_at:
                break
        raise PeerLostError(f"not all ranks could connect within {self._limit_s:g} s; see the others' logs")


def _wait_until_connected(control: dist.ProcessGroup, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Wait until all ranks have completed their connections; for a short time also after a stop signal.

    If a rank left earlier, above all rank 0 with the store, the others would try to connect for minutes. A
    broadcast connects its tree, which ``checkpoint.control_group`` also uses. The sum, whose connections form
    a ring, ends once all ranks have theirs.
    """
    wait = _Wait(network.polls(limit_s), limit_s, must_stop)
    for collective in (partial(dist.broadcast, src=0), dist.all_reduce):
        work = collective(torch.zeros(1), group=control, async_op=True)
        assert work is not None, "this rank is in the group"
        wait.until(work.is_completed)
        work.wait()  # raises if a peer was lost


def limit_group(group: dist.ProcessGroup) -> None:
    """Set the timeout of a group from torch to that of the default group, if ``make_group`` created that.

    Torch's timeout, 10 min for NCCL, is shorter than the first step of a rank may be.
    """
    if (timeout := _timeouts.get(dist.group.WORLD)) is not None:
        _set_timeout(timeout, group)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    # Public since torch 2.15, private before; if neither exists the long timeout remains.
    set_timeout = getattr(dist, "set_timeout", None) or getattr(distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout, group)
