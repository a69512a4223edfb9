"""Rendezvous of the ranks and the process group; which errors mean a lost peer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from hpc_train.distributed import network
from hpc_train.distributed.env import RankFacts, node_name
from hpc_train.distributed.shared_flags import SharedFlags, open_shared_flags
from hpc_train.distributed.shared_sum import SharedSum, open_shared_sum
from hpc_train.distributed.timed_call import within
from hpc_train.errors import PeerLostError, TryAgainError, UsageError, UserError
from hpc_train.run.files import read_json, write_json

#: Keys of the store, and their values: who came; whether all continue or all leave; who read that.
_ARRIVED, _VERDICT, _READ = "hpc_train/arrived", "hpc_train/verdict", "hpc_train/read"
_GO, _LEAVE = "go", "leave"
#: Assumed: how long rank 0 keeps the store for the others to read that all leave.
_READ_LIMIT_S = 2.0
#: Assumed: how long a rank that is asked to stop waits for the others to connect, usually a moment.
_CONNECT_LIMIT_S = 10.0
#: Assumed: rank 0 listens before it publishes its address, so it is reached sooner than this or never.
_ANSWER_LIMIT_S = 40.0
#: gloo's messages, as RuntimeErrors, when the peer is gone or silent.
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
    "find interface",
    "find address",
)
#: For tests with several ranks on one GPU, which NCCL refuses: ``gloo``.
_TEST_CUDA_BACKEND = "HPC_TRAIN_TEST_CUDA_BACKEND"
#: Read by torch when a gloo group is made.
_LAZY = "TORCH_GLOO_LAZY_INIT"
#: NCCL errors of this rank itself: they are its own reason, not a peer's.
_OWN_NCCL = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait for each other. Assumed."""

    join_s: float = 600.0
    #: In a collective, for a silent peer.
    silence_s: float = 1800.0
    #: Rank 0 may be closing its loggers, which takes half a minute if a server is slow.
    leave_s: float = 60.0
    #: For NCCL and gloo to destroy unused groups.
    teardown_s: float = 30.0

    @classmethod
    def beyond(cls, hang_after_s: float) -> Timeouts:
        """Return timeouts such that a watchdog with this limit, which can name who hangs, comes first."""
        return cls(silence_s=2 * hang_after_s)


@dataclass(frozen=True)
class Group:
    """The process group of all ranks, and the group for control messages.

    ``control`` is the only gloo group of all ranks besides the backend's own. It connects a rank with the few
    peers to which it sends, at most 2 + log2(ranks), rather than with all.
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
    #: Where all ranks are on one node: what they exchange at each step.
    shared_flags: SharedFlags | None = None

    def open_shared_sum(self) -> SharedSum | None:
        """Return what averages over the ranks in shared memory; None on all where the backend is to be used.
        Collective.
        """
        if self.shared_flags is None or self.device.type != "cpu":
            return None
        return open_shared_sum(self.rank, self.world_size, self.control, self.timeouts.silence_s)

    def wait_to_leave(self) -> None:
        """Wait, for a limited time, until all ranks are here: when one exits, Slurm ends the others.

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


def join(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts = Timeouts(),
    *,
    must_stop: Callable[[], bool] = lambda: False,
) -> Group:
    """Form the process group of all ranks, also for a single one. Collective.

    Ranks meet at MASTER_ADDR and MASTER_PORT if both are set, else at the address that rank 0 writes to the
    file ``rendezvous``; ``token`` distinguishes this attempt's file from an older one. ``must_stop`` on any
    rank ends the wait on all. When it returns no rank is still connecting inside torch, where signals are not
    handled: any may leave. Raises TryAgainError when stopped, PeerLostError when a rank does not come,
    UsageError if this node lacks the chosen interface.
    """
    if facts.num_nodes == 1:
        network.check_loopback(os.environ)
    if facts.num_nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would look up the host's name, which may not resolve on a laptop.
        os.environ["GLOO_SOCKET_IFNAME"] = network.loopback_interface()
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device.type == "cuda" else [])]
    network.check_interfaces(os.environ, names)
    store = _meet(facts, rendezvous, token, timeouts, must_stop)
    timeout = timedelta(seconds=timeouts.silence_s)
    # With NCCL the default group has a gloo group for CPU tensors, which training does not use.
    has_own_gloo = device.type == "cuda"
    with _own_faults_named(), _connecting_at_first_use() if has_own_gloo else contextlib.nullcontext():
        dist.init_process_group(
            f"cpu:gloo,cuda:{os.environ.get(_TEST_CUDA_BACKEND, 'nccl')}" if has_own_gloo else "gloo",
            store=store,
            rank=facts.rank,
            world_size=facts.world_size,
            timeout=timeout,
        )
    with _own_faults_named(), _connecting_at_first_use():
        control = dist.group.WORLD if has_own_gloo else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    # The main thread's connection serves one thread at a time.
    own = store.clone() if hasattr(store, "clone") else store
    _wait_until_connected(control, timeouts.join_s, must_stop)
    flags = None
    if facts.num_nodes == 1 and facts.world_size > 1:
        flags = open_shared_flags(facts.rank, facts.world_size, control, timeouts.silence_s)
    return Group(facts.rank, facts.world_size, device, control, own, timeouts, flags)


def peer_lost(error: BaseException | None) -> bool:
    """Tell whether ``error``, or its cause, only says that another rank is gone or silent."""
    while error is not None and not isinstance(error, UserError):  # which names a cause of its own
        if isinstance(error, PeerLostError | dist.DistNetworkError | dist.DistStoreError):
            return True
        text = str(error)
        if isinstance(error, dist.DistBackendError):
            return not any(mark in text for mark in _OWN_NCCL)
        if isinstance(error, RuntimeError) and any(mark in text for mark in _GLOO_LOST):
            return not any(mark in text for mark in _OWN_GLOO)
        error = error.__cause__
    return False


def nccl_words(error: BaseException | None) -> str | None:
    """Return NCCL's message about a lost peer in one line, if it may be this node's own fault; else None.

    ncclSystemError and ncclInternalError are raised for both: a peer that is gone, and a /dev/shm that is too
    small or an interface that is missing.
    """
    while error is not None:
        if isinstance(error, dist.DistBackendError):
            return None if "ncclRemoteError" in str(error) else " ".join(str(error).split())
        error = error.__cause__
    return None


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
    """Return the store at MASTER_ADDR and MASTER_PORT: rank 0's, or that of the agent that started ranks.

    Raises UsageError if it can't be used, TryAgainError when stopped meanwhile.
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
        what = "rank 0 can't listen, or can't reach itself," if facts.rank == 0 else "rank 0 does not answer"
        raise UsageError(
            f"{place}: {what} there, as seen from {_here()}: {_first_line(error)}; the address must be that "
            "of rank 0's node, and the port free"
        ) from error


def _wait_for_host(host: str, port: int, place: str, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Return once something answers at ``host`` and ``port``; torch would not handle signals meanwhile."""
    for _ in network.polls(limit_s):
        if must_stop():
            raise TryAgainError("stopped while waiting for rank 0, before training began")
        if network.reach([host], port) is not None:
            return
    raise UserError(f"{place}: nothing answers there within {limit_s:g} s, as seen from {_here()}")


@contextlib.contextmanager
def _own_faults_named() -> Iterator[None]:
    """Raise UsageError if gloo can't use an interface of this node, which it reports like a lost peer."""
    try:
        yield
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _OWN_GLOO):
            raise
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: gloo can't listen on {_here()}, "
            f"whose usable interfaces are {', '.join(network.usable_interfaces())}: {_first_line(error)}"
        ) from error


def _here() -> str:
    return f"node {node_name(os.environ)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()


def _open_store(path: Path, token: str, timeout: timedelta, facts: RankFacts) -> Store:
    """Start the store on a port chosen by the kernel, which can't be in use, and publish it."""
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
    except dist.DistNetworkError as error:  # no other rank is connected yet
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
        # On a node other than rank 0's, srun's address as seen from this node is worth a try, too.
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
    # Listing the folder makes a network file system look again.
    found = read_json(path) if path.name in os.listdir(path.parent) else None  # noqa: PTH208
    return found if found is not None and found.get("token") == token else None


def _start_together(store: Store, facts: RankFacts, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Wait until all ranks are here, or until one is asked to stop: then none continues.

    The first decision holds for all. Otherwise a rank would wait for one that has left, inside torch, where
    signals are not handled.
    """
    if store.add(_ARRIVED, 1) == facts.world_size:
        store.compare_set(_VERDICT, "", _GO)
    for _ in network.polls(limit_s):
        if must_stop():
            store.compare_set(_VERDICT, "", _LEAVE)
        if store.check([_VERDICT]):
            break
    else:
        came = store.add(_ARRIVED, 0)
        raise PeerLostError(
            f"{came} of {facts.world_size} ranks came within {limit_s:g} s; see the others' logs"
        )
    if store.get(_VERDICT).decode() == _LEAVE:
        _leave_store(store, facts)
        raise TryAgainError("stopped before training began")


@contextlib.contextmanager
def _connecting_at_first_use() -> Iterator[None]:
    """Have gloo connect two ranks of a group made meanwhile once one sends to the other."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY]
        if before is not None:
            os.environ[_LAZY] = before


def _wait_until_connected(control: dist.ProcessGroup, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Wait until all ranks have completed their connections; for a while also if one is asked to stop.

    If a rank left earlier, above all rank 0 with the store, the others would try to connect for minutes. A
    broadcast makes the connections of its tree, which ``checkpoint.control_group`` uses too; the sum, whose
    connections form a ring, ends once all ranks have theirs.
    """
    polls, stop_at = network.polls(limit_s), float("inf")
    for collective in (partial(dist.broadcast, src=0), dist.all_reduce):
        work = collective(torch.zeros(1), group=control, async_op=True)
        assert work is not None, "this rank is in the group"
        for _ in polls:
            if work.is_completed():
                work.wait()  # raises where a peer was lost
                break
            if must_stop():
                stop_at = min(stop_at, time.monotonic() + _CONNECT_LIMIT_S)
            if time.monotonic() >= stop_at:
                raise TryAgainError("stopped before training began")
        else:
            raise PeerLostError(f"not all ranks could connect within {limit_s:g} s; see the others' logs")


def _leave_store(store: Store, facts: RankFacts) -> None:
    """Let the others read the verdict before rank 0 destroys the store."""
    store.add(_READ, 1)
    if facts.rank == 0:
        for _ in network.polls(_READ_LIMIT_S):
            if store.add(_READ, 0) >= store.add(_ARRIVED, 0):
                break


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    # Public from 2.15 on, private before; if neither exists the long timeout is kept.
    set_timeout = getattr(dist, "set_timeout", None) or getattr(distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout, group)
