"""Ranks find each other and form the process group; what counts as a lost peer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from hpc_train.errors import PeerLostError, TryAgainError, UsageError
from hpc_train.run_folder.files import read_json, write_json
from hpc_train.runtime.ranks import RankFacts

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
#: What gloo says, as RuntimeErrors, when the other end is gone or silent.
_GLOO_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "gloo/transport",
    "Connect timeout",
)
#: NCCL errors that are this rank's own: they are its reason, not a peer's.
_OWN_NCCL = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait for each other. Assumed; the first step compiles and reads cold data."""

    join_s: float = 600.0
    first_step_s: float = 1800.0
    later_s: float = 300.0


@dataclass(frozen=True)
class Group:
    """The process group of all ranks; ``control`` is a gloo group of its own for agreement and saves."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    timeouts: Timeouts

    def shorten_timeouts(self) -> None:
        """Wait less for peers from now on; called after the first step."""
        for group in (dist.group.WORLD, self.control):
            _set_timeout(timedelta(seconds=self.timeouts.later_s), group)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait long on the control group: for a save, in which one rank's disk may be slow. After step 1."""
        _set_timeout(timedelta(seconds=self.timeouts.first_step_s), self.control)
        try:
            yield
        finally:
            _set_timeout(timedelta(seconds=self.timeouts.later_s), self.control)

    def leave(self) -> None:
        """Tear the groups down. Never raises: the work is done or lost already."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def join(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts = Timeouts(),
    *,
    listen_on: str = _LOOPBACK,
    must_stop: Callable[[], bool] = lambda: False,
) -> Group:
    """Form the process group of all ranks, also of one. Collective.

    Ranks meet at MASTER_ADDR and MASTER_PORT where both are set, else at the address that rank 0 writes into
    the file ``rendezvous``; ``token`` tells this attempt's file from an older one. ``must_stop`` ends the
    wait for it. Raises TryAgainError when stopped, PeerLostError when rank 0 does not come.
    """
    if facts.num_nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would look up the host's name, which on a laptop may not resolve.
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    store = _meet(facts, rendezvous, token, timeouts, listen_on, must_stop)
    timeout = timedelta(seconds=timeouts.first_step_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Group(facts.rank, facts.world_size, device, control, timeouts)


def peer_lost(error: BaseException | None) -> bool:
    """Tell whether ``error``, or what caused it, only says that another rank is gone or silent."""
    while error is not None:
        if isinstance(error, PeerLostError | dist.DistNetworkError | dist.DistStoreError):
            return True
        text = str(error)
        if isinstance(error, dist.DistBackendError):
            return not any(mark in text for mark in _OWN_NCCL)
        if isinstance(error, RuntimeError) and any(mark in text for mark in _GLOO_LOST):
            return True
        error = error.__cause__
    return False


def _meet(
    facts: RankFacts,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts,
    listen_on: str,
    must_stop: Callable[[], bool],
) -> Store:
    timeout = timedelta(seconds=timeouts.join_s)
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        # torch's own: under torchrun the store is the agent's, with a prefix a restart.
        return next(torch_rendezvous("env://", facts.rank, facts.world_size, timeout=timeout))[0]
    if facts.world_size == 1:
        return HashStore()
    if facts.num_nodes > 1 and listen_on == _LOOPBACK:
        raise UsageError(
            f"MASTER_ADDR: not set, and {facts.num_nodes} nodes can't meet on {_LOOPBACK}; "
            "set MASTER_ADDR and MASTER_PORT to an address of the first node"
        )
    if facts.rank == 0:
        return _open_store(rendezvous, token, timeout, listen_on, facts.world_size)
    host, port = _wait_for_address(rendezvous, token, timeouts.join_s, must_stop)
    return TCPStore(host, port, facts.world_size, is_master=False, timeout=timeout)


def _open_store(path: Path, token: str, timeout: timedelta, listen_on: str, world_size: int) -> Store:
    """Start the store on a port that the kernel chose, and publish it. Such a port can't be taken."""
    listener = socket.create_server((listen_on, 0), backlog=max(1024, world_size))
    port = listener.getsockname()[1]
    store = TCPStore(
        listen_on,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    write_json(path, {"host": listen_on, "port": port, "token": token})
    return store


def _wait_for_address(
    path: Path, token: str, limit_s: float, must_stop: Callable[[], bool]
) -> tuple[str, int]:
    deadline = time.monotonic() + limit_s
    while True:
        # Listing the folder makes a network file system look again.
        published = read_json(path) if path.name in os.listdir(path.parent) else None  # noqa: PTH208
        if published is not None and published.get("token") == token:
            return str(published["host"]), int(published["port"])
        if must_stop():
            raise TryAgainError("stopped while waiting for rank 0, before training began")
        if time.monotonic() > deadline:
            raise PeerLostError(f"rank 0 published no address in {path} within {limit_s:g} s; see its log")
        time.sleep(_POLL_S)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    # Public from 2.15 on, private before; where neither is there the long timeout stays.
    set_timeout = getattr(dist, "set_timeout", None) or getattr(distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout, group)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else next((name for name in names if name.startswith("lo")), "lo")
