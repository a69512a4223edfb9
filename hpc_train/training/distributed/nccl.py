"""Choice and arguments of torch's two classes of NCCL process groups, and the meaning of their errors.

``nccl`` is ProcessGroupNCCL up to torch 2.14. From 2.15 on it is ProcessGroupNCCL2, unless
TORCH_DIST_USE_NCCL2 is 0. That class guesses a rank's device from its number, connects the ranks as soon as
it is created, counts no collectives, creates the groups of a mesh by splitting, and raises RuntimeErrors.
Imports no torch, so that a launcher can classify the text of a log.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
