"""What torch's NCCL watchdog prints before it aborts a rank: texts of torch 2.11 and 2.15."""

from __future__ import annotations

import os

_FRAMES = "".join(
    f"frame #{number}: c10d::ProcessGroupNCCL::{'x' * 200}() + 0x1f (0x7f in libtorch_cuda.so)\n"
    for number in range(12)
)
_DIED = "Process group watchdog thread terminated with exception: CUDA error: "
_RAISED = "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44:\n"


def _watchdog(message: str) -> str:
    head = "[PG ID 0 PG GUID 0(default_pg) Rank 1] "
    logged = f"[rank1]:[E1127 10:11:12.013 ProcessGroupNCCL.cpp:2057] {head}{message}\n{_RAISED}{_FRAMES}\n"
    thrown = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    return f"{logged}{thrown}  what():  {head}{message}\n{_RAISED}{_FRAMES}"


DEVICE_LINE = f"{_DIED}uncorrectable ECC error encountered"
PROGRAM_LINE = f"{_DIED}device-side assert triggered"
PEER_LINE = "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9"
TIMEOUT_LINE = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
)
DEVICE, PROGRAM, PEER, TIMEOUT = map(_watchdog, (DEVICE_LINE, PROGRAM_LINE, PEER_LINE, TIMEOUT_LINE))


def abort_as(text: str) -> None:
    """Print what the watchdog does, and end like it."""
    print(text, flush=True)
    os.abort()
