"""The memory of a rank's device: of GPUs by the name that a site gives them, of this machine by asking it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: The part of a device's memory that a step may take. The rest is for the CUDA context, NCCL's buffers and
#: fragmentation. Assumed.
USABLE = 0.9
_GIB = 2**30
#: GiB of the smallest variant, by the vendors' data sheets. The first row whose pattern is in the name
#: counts.
_GPUS = (
    (r"gh200", 96),
    (r"gb200|b200", 180),
    (r"h200", 141),
    (r"h100.?nvl", 94),
    (r"h100|h800", 80),
    (r"h20(?![a-z0-9])", 96),
    (r"a100|a800", 40),
    (r"a40(?![a-z0-9])", 48),
    (r"a30(?![a-z0-9])", 24),
    (r"a10g?(?![a-z0-9])", 24),
    (r"a16(?![a-z0-9])", 16),
    (r"a2(?![a-z0-9])", 16),
    (r"l40s?", 48),
    (r"l4(?![a-z0-9])", 24),
    (r"v100", 16),
    (r"p100", 16),
    (r"p40(?![a-z0-9])", 24),
    (r"t4(?![a-z0-9])", 16),
    (r"k80", 12),
    (r"rtx.?6000.?ada|rtx.?a6000|a6000", 48),
    (r"rtx.?pro.?6000", 96),
    (r"rtx.?6000", 24),
    (r"rtx.?a5000|a5000", 24),
    (r"5090", 32),
    (r"4090|3090", 24),
    (r"2080.?ti", 11),
    (r"2080", 8),
    (r"titan.?rtx", 24),
    (r"titan", 12),
    (r"mi355", 288),
    (r"mi325", 256),
    (r"mi300x", 192),
    (r"mi300", 128),
    (r"mi250|mi210", 64),
    (r"mi100", 32),
)
#: Before the name of a model: no letter of another word, as in ``opa100``, but that of a vendor.
_BEFORE = r"(?<![a-z0-9])(?:\d+x)?(?:nvidia|amd|tesla|quadro|geforce|gpu|rtx|gtx)*"
#: ``a100-80gb``, ``a100_80g``, ``v100-32``; without a unit only sizes that a model comes in.
_WRITTEN = re.compile(
    r"(?:(?<![a-z0-9])|(?<=gpu))(\d{1,3})\s*gb(?![a-z0-9])"
    r"|[-_ ](\d{2,3})g(?![a-z0-9])"
    r"|[-_](16|24|32|40|48|64|80|94|96|141|144)(?![a-z0-9.])"
)
#: Any other size in the name of a GH200 is that of the CPU's memory: ``GH200 120GB``, ``GH200 480GB``.
_GH200_GIB = (96, 144)
#: A slice of a GPU, of which the memory is written: ``1g.10gb``.
_MIG = re.compile(r"(?<![0-9])\dg\.(\d{1,3})gb")
_IS_GPU = re.compile(r"(?<![a-z0-9])gpu")
#: The most that any GPU has: a larger size is that of a disk or of the node.
_MOST_GIB = 288
_SMI_LIMIT_S = 30.0


@dataclass(frozen=True)
class Device:
    """What a rank runs on."""

    #: In words, for the plan.
    name: str
    is_gpu: bool
    #: None: unknown.
    memory_bytes: int | None
    #: What to write so that it becomes known.
    remedy: str = "write the name of a known GPU"

    @property
    def limit_bytes(self) -> int | None:
        """What a step may take."""
        return None if self.memory_bytes is None else int(self.memory_bytes * USABLE)


def gpu_memory_gib(name: str) -> int | None:
    """Return the memory of a GPU by the name that a site or the driver gives it; None if it is unknown.

    A size in the name counts; of a name without one, the smallest variant of the model. Of a constraint
    with several names, such as ``a100|h100``, the smallest that is known counts.
    """
    known = [gib for part in re.split(r"[|&,]", name.lower()) if (gib := _memory_of_one(part)) is not None]
    return min(known, default=None)


def _memory_of_one(lower: str) -> int | None:
    """Return the size that a name has, if it is one of a GPU: other features have sizes as well."""
    if piece := _MIG.search(lower):
        return int(piece[1])
    model = next((gib for pattern, gib in _GPUS if re.search(f"{_BEFORE}(?:{pattern})", lower)), None)
    if model is None and not _IS_GPU.search(lower):
        return None
    written = [found[1] or found[2] or (model and found[3]) for found in _WRITTEN.finditer(lower)]
    sizes = [int(size) for size in written if size]
    if "gh200" in lower:
        return next((size for size in sizes if size in _GH200_GIB), model)
    return next((size for size in sizes if size <= _MOST_GIB), model)


def device_here(device: str, ranks: int) -> Device:
    """Return what each of ``ranks`` ranks of this machine has. ``device``: of the file."""
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
