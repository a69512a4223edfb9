"""The memory of a rank's device: by a GPU's name at a site, or by querying this machine."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: The driver's share of the memory that nvidia-smi shows: 1 % and 0.25 GiB. Measured: 0.6 of 140.4 GiB of an
#: H200. Read in reports of OutOfMemoryError: 0.4 of 15 (T4), 0.5 of 45 (L40S), 0.9 of 80 GiB (A100).
_DRIVER_SHARE, _DRIVER_GIB = 0.01, 0.25
#: The CUDA context with its kernels, and the workspaces of cuBLAS (32 MiB per handle on Hopper) and cuDNN.
_CONTEXT_GIB = 1.5
#: An NCCL communicator's buffers. Assumed: 4 MiB (NCCL_BUFFSIZE) per channel and peer that is connected.
_COMMUNICATOR_GIB = 0.5
#: The usable part of the rest: allows for the prediction's error, which was up to a tenth in eight cases on
#: an H200, and for fragmentation. There nvidia-smi showed 1.5 GiB above the allocated 6.1 of a GPT and 2.6
#: above the 10.8 of a ResNet-50. On a CPU, the part of all memory (assumed).
_USABLE = 0.9
_GIB = 2**30
_SMI_LIMIT_S = 30.0


@dataclass(frozen=True)
class Device:
    """The device of a rank."""

    #: Description for the plan.
    name: str
    is_gpu: bool
    #: As nvidia-smi shows it; None: unknown.
    memory_bytes: int | None
    #: How to make the memory known.
    remedy: str = "write the name of a known GPU"
    #: Number of NCCL communicators of a rank.
    communicators: int = 0

    @property
    def limit_bytes(self) -> int | None:
        """Memory available to a step."""
        if self.memory_bytes is None:
            return None
        taken = 0.0
        if self.is_gpu:
            taken = _DRIVER_SHARE * self.memory_bytes / _GIB + _DRIVER_GIB
            taken += _CONTEXT_GIB + _COMMUNICATOR_GIB * self.communicators
        return max(0, int((self.memory_bytes - taken * _GIB) * _USABLE))


def device_here(device: str, ranks: int) -> Device:
    """Return the device of each of ``ranks`` ranks on this machine. ``device``: the file's."""
    found = None if device == "cpu" else _local_gpu()
    if found is not None:
        return found
    if device == "cuda":
        return Device("GPU", is_gpu=True, memory_bytes=None)
    return Device("CPU of this machine", is_gpu=False, memory_bytes=_machine_memory() // ranks)


def _local_gpu() -> Device | None:
    """Return the smallest GPU of this machine; None if there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.split(", ", 1) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    sizes = [(int(row[0]), row[1]) for row in rows if len(row) == 2 and row[0].isdecimal()]
    if not sizes:
        return None
    mib, name = min(sizes)
    return Device(name, is_gpu=True, memory_bytes=mib * 2**20)


def _machine_memory() -> int:
    match = re.search(
        r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert match is not None, "Linux has it"
    return int(match[1]) * 1024
