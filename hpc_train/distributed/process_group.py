"""Rendezvous of the ranks, their process group, and the classification of errors as lost peers.

Ranks ``meet`` at the store, then each starts its watchdog, then ``make_group`` connects them. The control
group is gloo's, because a second group of all ranks would cost another socket per peer; two threads use it:
the training thread by collectives, the thread that writes a checkpoint point to point
(``checkpoint.control_group``).
"""

from __future__ import annotations

import contextlib
import logging
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
from torch._C._distributed_c10d import (
    DebugLevel,
    HashStore,
    Store,
    TCPStore,
    get_debug_level,
    set_debug_level,
)
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from hpc_train.distributed import nccl, network, signals
from hpc_train.distributed.env import RankFacts, node_name
from hpc_train.distributed.shared_flags import SharedFlags, open_shared_flags
from hpc_train.distributed.shared_sum import SharedSum, open_shared_sum
from hpc_train.distributed.timed_call import within
from hpc_train.errors import NetworkFaultError, PeerLostError, TryAgainError, UsageError, UserError
from hpc_train.run.files import read_json, write_json

#: Keys of the store: number of ranks that arrived, the verdict (all continue or all leave), its readers.
_ARRIVED, _VERDICT, _READ = "hpc_train/arrived", "hpc_train/verdict", "hpc_train/read"
_GO, _LEAVE = "go", "leave"
#: Assumed: time for which rank 0 keeps the store so that the others can read the verdict to leave.
_READ_LIMIT_S = 2.0
#: Assumed: time for which a rank with a stop signal waits for the others to connect; usually a moment.
_CONNECT_LIMIT_S = 10.0
#: Assumed: rank 0 listens before it publishes its address, so it answers within this time or never.
_ANSWER_LIMIT_S = 40.0
#: gloo's RuntimeErrors if the peer is gone or silent.
_GLOO_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "gloo/transport",
    "Connect timeout",
)
#: gloo's messages about this node's own interfaces, before any peer is connected.
_OWN_GLOO = (
    "tcp/device.cc",
    "tcp/listener.cc",
    "tcp/helpers.cc",
    "tcp/attr.cc",
    "tcp/loop.cc",
    "find interface",
    "find address",
)
#: For tests with several ranks on one GPU, which NCCL refuses: ``gloo``.
_TEST_CUDA_BACKEND = "HPC_TRAIN_TEST_CUDA_BACKEND"
#: Read by torch when a gloo group is created.
_LAZY = "TORCH_GLOO_LAZY_INIT"
#: Timeout of groups, by the default group that ``make_group`` created last.
_timeouts: dict[dist.ProcessGroup | None, timedelta] = {}
#: Interval at which a rank inside torch checks for a stop signal.
_POLL_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Limits of waiting for other ranks. Assumed."""

    join_s: float = 600.0
    #: For a silent peer in a collective.
    silence_s: float = 1800.0
    #: Rank 0 may be closing its loggers, which takes half a minute if a server is slow.
    leave_s: float = 60.0
    #: For NCCL and gloo to destroy unused groups.
    teardown_s: float = 30.0

    @classmethod
    def beyond(cls, hang_after_s: float) -> Timeouts:
        """Return timeouts that expire after a watchdog with this limit, which can name the hung rank."""
        return cls(silence_s=2 * hang_after_s)


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
    store: Store
    timeouts: Timeouts
    #: Memory for the exchange at each step, if all ranks are on one node.
    shared_flags: SharedFlags | None = None

    def connect(self) -> None:
        """Run a first collective on the device's backend, in which NCCL connects the ranks. Collective.

        Raises NetworkFaultError if this node can't connect, PeerLostError if a peer does not.
        """
        with _connection_faults_named():
            _in_thread(self._sum, self.device, self.timeouts.join_s)

    def _sum(self) -> None:
        total = torch.ones(1, device=self.device)
        dist.all_reduce(total)
        total.item()  # NCCL connects some of its channels on the device's stream

    def open_shared_sum(self) -> SharedSum | None:
        """Return an average over the ranks in shared memory; None on all if only the backend can be used.
        Collective.
        """
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
        within(self.timeouts.teardown_s, self._destroy, "leaving")

    def _destroy(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread starts with device 0
        dist.destroy_process_group()


@dataclass(frozen=True)
class Meeting:
    """The store after all ranks have arrived, before torch connects them to each other."""

    store: Store
    #: Over a separate connection, for use by one thread.
    own_store: Store


def join(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts = Timeouts(),
    *,
    must_stop: Callable[[], bool] = lambda: False,
) -> Group:
    """Form the process group of all ranks: ``meet``, then ``make_group``. Collective."""
    meeting = meet(facts, device, rendezvous, token, timeouts, must_stop=must_stop)
    return make_group(facts, device, meeting, timeouts, must_stop=must_stop)


def meet(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts,
    *,
    must_stop: Callable[[], bool],
) -> Meeting:
    """Wait for all ranks, also if there is one. Collective.

    Ranks meet at MASTER_ADDR and MASTER_PORT if both are set, else at the address that rank 0 writes to the
    file ``rendezvous``; ``token`` distinguishes this attempt's file from an older one. ``must_stop`` on any
    rank ends the wait on all. Raises TryAgainError if stopped, PeerLostError if a rank does not arrive,
    UsageError if this node lacks the chosen interface.
    """
    if facts.world_size > 1 and get_debug_level() == DebugLevel.DETAIL:
        _log.warning("TORCH_DISTRIBUTED_DEBUG: torch's DDP crashes with DETAIL; INFO is used")  # torch 2.15
        set_debug_level(DebugLevel.INFO)
    if facts.num_nodes == 1:
        network.check_loopback(os.environ)
        # Gloo would resolve the host name, which may fail on a laptop; NCCL would use an interface of virtual
        # machines.
        network.use_interface(network.loopback_interface())
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device.type == "cuda" else [])]
    network.check_interfaces(os.environ, names)
    store = _meet(facts, rendezvous, token, timeouts, must_stop)
    # A connection serves one thread at a time.
    return Meeting(store, store.clone() if hasattr(store, "clone") else store)


def make_group(
    facts: RankFacts,
    device: torch.device,
    meeting: Meeting,
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
        arguments = nccl.prepare(device, os.environ)
    make = partial(
        dist.init_process_group,
        f"cpu:gloo,cuda:{backend}" if has_own_gloo else "gloo",
        store=meeting.store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timedelta(seconds=timeouts.join_s),
        **arguments,
    )
    with _connection_faults_named(), _connecting_at_first_use() if has_own_gloo else contextlib.nullcontext():
        _in_thread(make, device, timeouts.join_s, must_stop)
    timeout = timedelta(seconds=timeouts.silence_s)
    _set_timeout(timeout, None)
    _timeouts.clear()
    _timeouts[dist.group.WORLD] = timeout
    with _connection_faults_named(), _connecting_at_first_use():
        control = dist.group.WORLD if has_own_gloo else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    _wait_until_connected(control, timeouts.join_s, must_stop)
    flags = None
    if facts.num_nodes == 1 and facts.world_size > 1:
        flags = open_shared_flags(facts.rank, facts.world_size, control, timeouts.silence_s)
    return Group(facts.rank, facts.world_size, device, control, meeting.own_store, timeouts, flags)


def peer_lost(error: BaseException | None) -> bool:
    """Return True if ``error``, or its cause, only reports that another rank is gone or silent.

    NCCL also reports a lost peer as a failed system call. Before the ranks are connected, such a failure is
    this node's fault: see ``Group.connect``.
    """
    while error is not None and not isinstance(error, UserError):  # which has another cause
        if isinstance(error, PeerLostError | dist.DistNetworkError | dist.DistStoreError):
            return True
        fault = _nccl_fault(error)
        if fault is not None:
            return fault in {nccl.Fault.PEER, nccl.Fault.SYSTEM}
        text = str(error)
        if isinstance(error, RuntimeError) and any(mark in text for mark in _GLOO_LOST):
            return not any(mark in text for mark in _OWN_GLOO)
        error = error.__cause__
    return False


def nccl_words(error: BaseException | None) -> str | None:
    """Return NCCL's message about a lost peer in one line if it may be this node's fault; else None.

    A failed system call or an internal error has either cause: a lost peer, or a small /dev/shm or missing
    interface on this node. The same applies to a peer that was never connected.
    """
    while error is not None:
        if isinstance(error, PeerLostError) and _nccl_fault(error.__cause__) is not None:
            return str(error)
        if (fault := _nccl_fault(error)) is not None:
            is_own = fault == nccl.Fault.SYSTEM
            return f"a peer is gone, or NCCL fails on this node: {_one_line(error)}" if is_own else None
        error = error.__cause__
    return None


def _nccl_fault(error: BaseException | None) -> nccl.Fault | None:
    if not isinstance(error, RuntimeError):
        return None
    unknown = nccl.Fault.PEER if isinstance(error, dist.DistBackendError) else None
    return nccl.fault_in(str(error)) or unknown


def _meet(
    facts: RankFacts, rendezvous: Path, token: str, timeouts: Timeouts, must_stop: Callable[[], bool]
) -> Store:
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _store_of_environment(facts, timeouts, must_stop, is_agents=is_agents)
        if not is_agents:
            _start_together(store, facts, timeouts.join_s, must_stop)
        return store
    timeout = timedelta(seconds=timeouts.join_s)
    if facts.world_size == 1:
        return HashStore()
    if facts.rank == 0:
        store = _open_store(rendezvous, token, timeout, facts)
    else:
        host, port = _wait_for_store(rendezvous, token, timeouts.join_s, must_stop)
        store = TCPStore(host, port, facts.world_size, is_master=False, timeout=timeout)
    _start_together(store, facts, timeouts.join_s, must_stop)
    return store


def _store_of_environment(
    facts: RankFacts, timeouts: Timeouts, must_stop: Callable[[], bool], *, is_agents: bool
) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT: rank 0's, or that of torchrun's agent.

    Raises UsageError if it can't be used, TryAgainError if stopped meanwhile.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    place, timeout = f"MASTER_ADDR={host}, MASTER_PORT={port}", timedelta(seconds=timeouts.join_s)
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(f"{place}: the port is not a number of 1 to 65535")
    try:
        if facts.rank != 0 or is_agents:
            _wait_for_host(host, int(port), place, timeouts.join_s, must_stop)
        if is_agents:  # torch's own: one prefix per restart
            return next(torch_rendezvous("env://", facts.rank, facts.world_size, timeout=timeout))[0]
        is_master = facts.rank == 0
        return TCPStore(
            host, int(port), facts.world_size, is_master=is_master, timeout=timeout, wait_for_workers=False
        )
    except dist.DistNetworkError as error:  # no other rank is connected yet
        fault = "rank 0 can't listen, or can't reach itself," if facts.rank == 0 else "rank 0 does not answer"
        raise UsageError(
            f"{place}: {fault} there, as seen from {_here()}: {_first_line(error)}; the address must be that "
            "of rank 0's node, and the port free"
        ) from error


def _wait_for_host(host: str, port: int, place: str, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Return once ``host`` and ``port`` answer; torch would not handle signals meanwhile."""
    for _ in network.polls(limit_s):
        if must_stop():
            raise TryAgainError("stopped while waiting for rank 0, before training began")
        if network.reach([host], port) is not None:
            return
    raise UserError(f"{place}: nothing answers there within {limit_s:g} s, as seen from {_here()}")


@contextlib.contextmanager
def _connection_faults_named() -> Iterator[None]:
    """Replace errors of gloo or NCCL, which resemble a lost peer, by errors that name the interface."""
    try:
        yield
    except RuntimeError as error:
        if any(mark in str(error) for mark in _OWN_GLOO):
            raise UsageError(
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: gloo can't listen on "
                f"{_here()}, whose usable interfaces are {', '.join(network.usable_interfaces())}: "
                f"{_first_line(error)}"
            ) from error
        fault, text = _nccl_fault(error), f"{_here()}: {_one_line(error)}"
        cant_connect = network.cant_connect("NCCL", os.environ)
        if fault == nccl.Fault.SYSTEM:
            raise NetworkFaultError(f"{cant_connect}; {text}") from error
        if fault == nccl.Fault.PEER:
            raise PeerLostError(f"a peer is gone, or {cant_connect}; {text}") from error
        raise


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


def _here() -> str:
    return f"node {node_name(os.environ)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()


def _open_store(path: Path, token: str, timeout: timedelta, facts: RankFacts) -> Store:
    """Start the store on a free port chosen by the kernel, and publish it."""
    listener, hosts = network.listen(os.environ, facts.num_nodes, backlog=max(1024, facts.world_size))
    address, port = listener.getsockname()[:2]
    network.use_interface_of(address)
    try:
        store = TCPStore(
            address,
            port,
            facts.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:  # no other rank is connected yet
        raise UsageError(
            f"rank 0 can't reach its own store at {address}, port {port}, on {_here()}: {_first_line(error)}"
        ) from error
    write_json(path, {"hosts": hosts, "port": port, "token": token})
    return store


def _wait_for_store(path: Path, token: str, limit_s: float, must_stop: Callable[[], bool]) -> tuple[str, int]:
    """Return the address at which rank 0's store answers."""
    published, answer_until = None, float("inf")
    for _ in network.polls(limit_s):
        if must_stop():
            raise TryAgainError("stopped while waiting for rank 0, before training began")
        if published is None and (published := _published(path, token)) is not None:
            answer_until = time.monotonic() + _ANSWER_LIMIT_S
        if published is None:
            continue
        # On other nodes than rank 0's, also try srun's address as seen from this node.
        hosts = [*published["hosts"], *filter(None, [os.environ.get("SLURM_SRUN_COMM_HOST")])]
        reached = network.reach(dict.fromkeys(hosts), published["port"])
        if reached is not None:
            network.use_interface_of(reached[1])
            return reached[0], published["port"]
        if time.monotonic() > answer_until:
            break
    if published is None:
        raise PeerLostError(f"rank 0 published no address in {path} within {limit_s:g} s; see its log")
    raise UserError(  # no other rank's error reports it
        f"rank 0 does not answer at any of {', '.join(published['hosts'])}, port {published['port']}, within "
        f"{min(limit_s, _ANSWER_LIMIT_S):g} s, as seen from {_here()}; set GLOO_SOCKET_IFNAME "
        "(network_interface of the site's profile) to the interface that connects the nodes"
    )


def _published(path: Path, token: str) -> dict[str, Any] | None:
    # Listing the folder refreshes the cache of a network file system.
    content = read_json(path) if path.name in os.listdir(path.parent) else None  # noqa: PTH208
    return content if content is not None and content.get("token") == token else None


def _start_together(store: Store, facts: RankFacts, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Wait until all ranks arrive, or until one receives a stop signal: then none continues.

    The first verdict applies to all. Otherwise a rank would wait inside torch, where signals are not handled,
    for a rank that has left.
    """
    if store.add(_ARRIVED, 1) == facts.world_size:
        store.compare_set(_VERDICT, "", _GO)
    for _ in network.polls(limit_s):
        if must_stop():
            store.compare_set(_VERDICT, "", _LEAVE)
        if store.check([_VERDICT]):
            break
    else:
        arrived = store.add(_ARRIVED, 0)
        raise PeerLostError(
            f"{arrived} of {facts.world_size} ranks came within {limit_s:g} s; see the others' logs"
        )
    if store.get(_VERDICT).decode() == _LEAVE:
        _leave_store(store, facts)
        raise TryAgainError("stopped before training began")


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


def _leave_store(store: Store, facts: RankFacts) -> None:
    """Let the others read the verdict before rank 0 destroys the store."""
    store.add(_READ, 1)
    if facts.rank == 0:
        for _ in network.polls(_READ_LIMIT_S):
            if store.add(_READ, 0) >= store.add(_ARRIVED, 0):
                break


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
