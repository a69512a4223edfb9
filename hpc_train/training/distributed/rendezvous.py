"""Rendezvous of the ranks: rank 0's store, its address, and the decision to start together or to leave."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from hpc_train.errors import PeerLostError, TryAgainError, UsageError, UserError
from hpc_train.rank import network
from hpc_train.rank.env import RankFacts
from hpc_train.run.files import read_json, write_json
from hpc_train.training.distributed.backends import first_line, this_node

#: Keys of the store: number of ranks that arrived, the verdict (all continue or all leave), its readers.
_ARRIVED, _VERDICT, _READ = "hpc_train/arrived", "hpc_train/verdict", "hpc_train/read"
_GO, _LEAVE = "go", "leave"
#: Assumed: time for which rank 0 keeps the store so that the others can read the verdict to leave.
_READ_LIMIT_S = 2.0
#: Assumed: rank 0 listens before it publishes its address, so it answers within this time or never.
_ANSWER_LIMIT_S = 40.0
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


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class Rendezvous:
    """The store after all ranks have arrived, before torch connects them to each other."""

    store: c10d.Store
    #: Over a separate connection, for use by one thread.
    own_store: c10d.Store


def meet(
    facts: RankFacts,
    device: torch.device,
    rendezvous: Path,
    token: str,
    timeouts: Timeouts,
    *,
    must_stop: Callable[[], bool],
) -> Rendezvous:
    """Wait for all ranks, also if there is one. Collective.

    Ranks meet at MASTER_ADDR and MASTER_PORT if both are set, else at the address that rank 0 writes to the
    file ``rendezvous``; ``token`` distinguishes this attempt's file from an older one. ``must_stop`` on any
    rank ends the wait on all. Raises TryAgainError if stopped, PeerLostError if a rank does not arrive,
    UsageError if this node lacks the chosen interface.
    """
    if facts.world_size > 1 and c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        _log.warning("TORCH_DISTRIBUTED_DEBUG: torch's DDP crashes with DETAIL; INFO is used")  # torch 2.15
        c10d.set_debug_level(c10d.DebugLevel.INFO)
    if facts.num_nodes == 1:
        network.check_loopback(os.environ)
        # Gloo would resolve the host name, which may fail on a laptop; NCCL would use an interface of virtual
        # machines.
        network.use_interface(network.loopback_interface())
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device.type == "cuda" else [])]
    network.check_interfaces(os.environ, names)
    store = _meet(facts, rendezvous, token, timeouts, must_stop)
    # A connection serves one thread at a time.
    return Rendezvous(store, store.clone() if hasattr(store, "clone") else store)


def _meet(
    facts: RankFacts, rendezvous: Path, token: str, timeouts: Timeouts, must_stop: Callable[[], bool]
) -> c10d.Store:
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _store_of_environment(facts, timeouts, must_stop, is_agents=is_agents)
        if not is_agents:
            _start_together(store, facts, timeouts.join_s, must_stop)
        return store
    timeout = timedelta(seconds=timeouts.join_s)
    if facts.world_size == 1:
        return c10d.HashStore()
    if facts.rank == 0:
        store = _open_store(rendezvous, token, timeout, facts)
    else:
        host, port = _wait_for_store(rendezvous, token, timeouts.join_s, must_stop)
        store = c10d.TCPStore(host, port, facts.world_size, is_master=False, timeout=timeout)
    _start_together(store, facts, timeouts.join_s, must_stop)
    return store


def _store_of_environment(
    facts: RankFacts, timeouts: Timeouts, must_stop: Callable[[], bool], *, is_agents: bool
) -> c10d.Store:
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
        return c10d.TCPStore(
            host, int(port), facts.world_size, is_master=is_master, timeout=timeout, wait_for_workers=False
        )
    except dist.DistNetworkError as error:  # no other rank is connected yet
        fault = "rank 0 can't listen, or can't reach itself," if facts.rank == 0 else "rank 0 does not answer"
        raise UsageError(
            f"{place}: {fault} there, as seen from {this_node()}: {first_line(error)}; the address must be "
            "that of rank 0's node, and the port free"
        ) from error


def _wait_for_host(host: str, port: int, place: str, limit_s: float, must_stop: Callable[[], bool]) -> None:
    """Return once ``host`` and ``port`` answer; torch would not handle signals meanwhile."""
    for _ in network.polls(limit_s):
        if must_stop():
            raise TryAgainError("stopped while waiting for rank 0, before training began")
        if network.reach([host], port) is not None:
            return
    raise UserError(f"{place}: nothing answers there within {limit_s:g} s, as seen from {this_node()}")


def _open_store(path: Path, token: str, timeout: timedelta, facts: RankFacts) -> c10d.Store:
    """Start the store on a free port chosen by the kernel, and publish it."""
    listener, hosts = network.listen(os.environ, facts.num_nodes, backlog=max(1024, facts.world_size))
    address, port = listener.getsockname()[:2]
    network.use_interface_of(address)
    try:
        store = c10d.TCPStore(
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
            f"rank 0 can't reach its own store at {address}, port {port}, on {this_node()}: "
            f"{first_line(error)}"
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
        f"{min(limit_s, _ANSWER_LIMIT_S):g} s, as seen from {this_node()}; set GLOO_SOCKET_IFNAME "
        "(network_interface of the site's profile) to the interface that connects the nodes"
    )


def _published(path: Path, token: str) -> dict[str, Any] | None:
    # Listing the folder refreshes the cache of a network file system.
    content = read_json(path) if path.name in os.listdir(path.parent) else None  # noqa: PTH208
    return content if content is not None and content.get("token") == token else None


def _start_together(
    store: c10d.Store, facts: RankFacts, limit_s: float, must_stop: Callable[[], bool]
) -> None:
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


def _leave_store(store: c10d.Store, facts: RankFacts) -> None:
    """Let the others read the verdict before rank 0 destroys the store."""
    store.add(_READ, 1)
    if facts.rank == 0:
        for _ in network.polls(_READ_LIMIT_S):
            if store.add(_READ, 0) >= store.add(_ARRIVED, 0):
                break
