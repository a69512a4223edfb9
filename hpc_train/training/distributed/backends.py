"""The backends of process groups: torch's two classes for NCCL, and the meaning of errors of NCCL and gloo.

An error means that a peer is gone, or that this node's own network fails.

``nccl`` is ProcessGroupNCCL up to torch 2.14. From 2.15 on it is ProcessGroupNCCL2, unless
TORCH_DIST_USE_NCCL2 is 0. That class guesses a rank's device from its number, connects the ranks as soon as
it is created, counts no collectives, creates the groups of a mesh by splitting, and raises RuntimeErrors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from enum import Enum

import torch
import torch.distributed as dist

from hpc_train.errors import NetworkFaultError, PeerLostError, UsageError, UserError
from hpc_train.rank import network
from hpc_train.rank.env import node_name

CLASS_VARIABLE = "TORCH_DIST_USE_NCCL2"
#: The flight recorders of ProcessGroupNCCL and of ProcessGroupNCCL2, which is selected by its backend.
_DUMPS: tuple[tuple[str, dict[str, str]], ...] = (
    ("_dump_nccl_trace_json", {}),
    ("_dump_fr_trace_json", {"backend": "nccl2"}),
    ("_dump_fr_trace_json", {"backend": "nccl"}),
)
#: Read by torch's flight recorder since 2.8, which warns of the older name, TORCH_NCCL_TRACE_BUFFER_SIZE.
_RECORDER_VARIABLE, _RECORDED_COLLECTIVES = "TORCH_FR_BUFFER_SIZE", "2000"


class Fault(Enum):
    """The cause that an NCCL error reports."""

    #: Another rank ended or was silent for too long.
    PEER = "a peer is gone"
    #: A call of this node failed: an interface, InfiniBand, /dev/shm; or a peer closed the connection.
    SYSTEM = "a system call failed"
    DEVICE = "the device failed"
    USAGE = "wrong usage"


#: By name as ProcessGroupNCCL writes it, and by ncclGetErrorString, which both write.
_MARKS = {
    "ncclRemoteError": Fault.PEER,
    "remote process exited": Fault.PEER,
    "communicator was aborted": Fault.PEER,
    "operation timed out": Fault.PEER,
    "operation timeout": Fault.PEER,
    "Operation timed out after": Fault.PEER,
    "retrieving ncclUniqueId": Fault.PEER,
    "ncclSystemError": Fault.SYSTEM,
    "unhandled system error": Fault.SYSTEM,
    "ncclInternalError": Fault.SYSTEM,
    "internal error - please report this issue to the NCCL": Fault.SYSTEM,
    "ncclUnhandledCudaError": Fault.DEVICE,
    "unhandled cuda error": Fault.DEVICE,
    "CUDA error": Fault.DEVICE,
    "ncclInvalidUsage": Fault.USAGE,
    "invalid usage": Fault.USAGE,
    "ncclInvalidArgument": Fault.USAGE,
    "invalid argument": Fault.USAGE,
    "ProcessGroupNCCL is bound to device": Fault.USAGE,
}
#: One of these is in each text of ProcessGroupNCCL2.
_OF_NCCL = ("NCCL", "nccl", "collective operation timed out", "watchdog detected operation", "[TC]")


def fault_in(text: str) -> Fault | None:
    """Return the first cause in an NCCL message, which may quote older ones after it; None if unknown."""
    if not any(mark in text for mark in _OF_NCCL):
        return None
    places = {text.find(mark): fault for mark, fault in _MARKS.items() if mark in text}
    return places[min(places)] if places else None


def uses_nccl2() -> bool:
    """Return True if torch creates a ProcessGroupNCCL2 for ``nccl``."""
    from torch.distributed import distributed_c10d

    return hasattr(distributed_c10d, "ProcessGroupNCCL2") and os.environ.get(CLASS_VARIABLE) != "0"


def prepare(device: torch.device, environ: MutableMapping[str, str]) -> dict[str, torch.device]:
    """Choose the class and record collectives, unless the user set their variables.

    Call it before a group is created. Returns the arguments of ``init_process_group`` that depend on the
    class. ProcessGroupNCCL connects at its first collective, on that tensor's device. With ``device_id`` it
    would connect at once and create the groups of a mesh by splitting, like ProcessGroupNCCL2.
    """
    environ.setdefault(CLASS_VARIABLE, "0")
    environ.setdefault(_RECORDER_VARIABLE, _RECORDED_COLLECTIVES)
    return {"device_id": device} if uses_nccl2() else {}


def recorded_collectives() -> bytes | None:
    """Return the content of NCCL's flight recorder as JSON; None if it has no collective."""
    with suppress(ImportError):
        from torch._C import _distributed_c10d as c10d

        for name, arguments in _DUMPS:
            # Private, and different in each version and class; a build without NCCL has none.
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):
                record: str | bytes = getattr(c10d, name)(**arguments)
                if json.loads(record).get("entries"):  # empty without collectives
                    return record.encode() if isinstance(record, str) else record
    return None


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
            return fault in {Fault.PEER, Fault.SYSTEM}
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
            is_own = fault == Fault.SYSTEM
            return f"a peer is gone, or NCCL fails on this node: {_one_line(error)}" if is_own else None
        error = error.__cause__
    return None


def _nccl_fault(error: BaseException | None) -> Fault | None:
    if not isinstance(error, RuntimeError):
        return None
    unknown = Fault.PEER if isinstance(error, dist.DistBackendError) else None
    return fault_in(str(error)) or unknown


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
        if fault == Fault.SYSTEM:
            raise NetworkFaultError(f"{cant_connect}; {text}") from error
        if fault == Fault.PEER:
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
