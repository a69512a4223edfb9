"""Classification of errors of gloo and NCCL: a peer is gone, or this node's own network fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hpc_train.errors import NetworkFaultError, PeerLostError, UsageError, UserError
from hpc_train.rank import network
from hpc_train.rank.env import node_name
from hpc_train.training.distributed import nccl

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


def peer_lost(error: BaseException | None) -> bool:
    """Return True if ``error``, or its cause, only reports that another rank is gone or silent.

    NCCL also reports a lost peer as a failed system call. Before the ranks are connected, such a failure is
    this node's fault: see ``process_group.Group.connect``.
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


@contextmanager
def connection_faults_named() -> Iterator[None]:
    """Replace errors of gloo or NCCL, which resemble a lost peer, by errors that name the interface."""
    try:
        yield
    except RuntimeError as error:
        if any(mark in str(error) for mark in _OWN_GLOO):
            raise UsageError(
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: gloo can't listen on "
                f"{this_node()}, whose usable interfaces are {', '.join(network.usable_interfaces())}: "
                f"{first_line(error)}"
            ) from error
        fault, text = _nccl_fault(error), f"{this_node()}: {_one_line(error)}"
        cant_connect = network.cant_connect("NCCL", os.environ)
        if fault == nccl.Fault.SYSTEM:
            raise NetworkFaultError(f"{cant_connect}; {text}") from error
        if fault == nccl.Fault.PEER:
            raise PeerLostError(f"a peer is gone, or {cant_connect}; {text}") from error
        raise


def this_node() -> str:
    """Return ``node`` and the name of this node."""
    return f"node {node_name(os.environ)}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message."""
    return str(error).partition("\n")[0].strip()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
