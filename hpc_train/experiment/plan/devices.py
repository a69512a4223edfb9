"""The memory of a rank's device, by a GPU's name at a site or from this machine; the peak rates of GPUs.

The rates, for model FLOPs utilization (MFU), are from the vendors' data sheets, none is measured. The data
sheets could not be fetched: A10, A40, A100, B200, B300, GB200, H20, H100 SXM, H200 SXM, L4, L40, L40S, MI300X
and RTX PRO 6000 Workstation were compared with copies of them on other sites, the rest is not checked.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

#: The part of GDDR memory that remains if the vendor turns on ECC; HBM has its own bits for it. Read:
#: nvidia-smi shows 15,360 MiB of a T4, 23,034 of an L4, 23,028 of an A10, 46,068 of an L40S
#: (thundergolfer.com/blog/nvidia-gpu-memory-capacity).
_LEFT_BY_ECC = 15 / 16
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
CONTEXT_BYTES = int(_CONTEXT_GIB * _GIB)
_SMI_LIMIT_S = 30.0


@dataclass(frozen=True)
class GPUModel:
    """One model. Several rows may share ``sites``; the first of them determines the memory."""

    #: A regular expression for the name used by a site or the driver, in lower case.
    sites: str
    #: GB of the variants as sold; the first applies to a name without a size.
    sizes: tuple[int, ...]
    #: A regular expression for the whole name that the driver reports, without the vendor. Names that match
    #: no row, such as a MIG slice's or a laptop's, have no peak.
    names: str = ""
    #: TFLOP/s by ``precision:``, dense (without sparsity), at boost clock; fp64 by tensor cores if possible.
    tflops: dict[str, float] = field(default_factory=dict)
    #: The vendor's document.
    source: str = ""
    #: Whether ECC of the GDDR memory is on as sold.
    has_ecc: bool = False

    def gib(self, written: list[int]) -> float:
        """Return the memory that nvidia-smi shows for a GPU whose name contains these sizes, in GiB."""
        size = next((gb for gb in written if gb in self.sizes), self.sizes[0])
        return size * _LEFT_BY_ECC if self.has_ecc else size


def _rates(half: float, **others: float) -> dict[str, float]:
    return {"bf16": half, "fp16": half, **others}


_SXM = _rates(989, tf32=495, fp32=67, fp64=67, fp8=1979)
_NVL = _rates(835.5, tf32=417.5, fp32=60, fp64=60, fp8=1670.5)
_PCIE = _rates(756.5, tf32=378, fp32=51, fp64=51, fp8=1513)
_V100 = r"V100-{}-(?:16|32)GB"
_PRO, _PRO_PAPER = "RTX PRO 6000 Blackwell ", "RTX PRO Blackwell white paper"
_END = r"(?![a-z0-9])"

#: The first row whose ``sites`` are in the name applies. Less than the nominal 192 GB of a B200 and 288 GB of
#: a B300 is usable.
GPU_MODELS = (
    GPUModel("gh200", (96, 144), r"GH200 (?:96GB HBM3|120GB|480GB|144G HBM3e)",
        _rates(990, tf32=494, fp32=67, fp64=67, fp8=1979), "GH200 data sheet"),
    GPUModel("gb300", (268,), "GB300", _rates(2500, tf32=1250, fp8=5000), "GB300 NVL72 data sheet, a 72nd"),
    GPUModel("b300", (268,), r"B300(?: SXM6 AC)?",
        _rates(2250, tf32=1125, fp32=75, fp64=1.25, fp8=4500), "HGX B300 data sheet, an eighth"),
    GPUModel("gb200", (184,), "GB200",
        _rates(2500, tf32=1250, fp32=80, fp64=40, fp8=5000), "GB200 data sheet, half a superchip"),
    GPUModel("b200", (179,), "B200",
        _rates(2250, tf32=1125, fp32=75, fp64=37, fp8=4500), "HGX B200 data sheet, an eighth"),
    GPUModel("h200", (141,), "H200", _SXM, "H200 data sheet, SXM"),
    GPUModel("h200", (141,), "H200 NVL", _NVL, "H200 data sheet, NVL"),
    GPUModel("h100.?nvl", (94,), "H100 NVL", _NVL, "H100 data sheet, NVL"),
    GPUModel("h100", (80, 64, 94, 96), "H100 80GB HBM3", _SXM, "H100 data sheet, SXM"),
    GPUModel("h100", (80,), "H100 PCIe", _PCIE, "H100 data sheet, 2022, PCIe"),
    GPUModel("h800", (80,), "H800", _SXM | {"fp64": 1}, "H800 data sheet, SXM"),
    GPUModel("h800", (80,), "H800 PCIe", _PCIE | {"fp64": 0.8}, "H800 data sheet, PCIe"),
    GPUModel("h20" + _END, (96, 141), r"H20(?:-3e)?",
        _rates(148, tf32=74, fp32=44, fp64=1, fp8=296), "H20 data sheet"),
    GPUModel("a100|a800", (40, 64, 80), r"A100-SXM4-(?:40|80)GB|A100-PCIE-40GB|A100 80GB PCIe",
        _rates(312, tf32=156, fp32=19.5, fp64=19.5), "A100 data sheet"),
    GPUModel("a40" + _END, (48,), "A40", _rates(149.7, tf32=74.8, fp32=37.4), "A40 data sheet", has_ecc=True),
    GPUModel("a30" + _END, (24,), "A30", _rates(165, tf32=82, fp32=10.3, fp64=10.3), "A30 data sheet"),
    GPUModel("a10g" + _END, (24,), "A10G", _rates(70, tf32=35, fp32=35), "A10G data sheet", has_ecc=True),
    GPUModel("a10" + _END, (24,), "A10", _rates(125, tf32=62.5, fp32=31.2), "A10 data sheet", has_ecc=True),
    GPUModel(f"(?:a16|a2){_END}", (16,), has_ecc=True),
    GPUModel("l40s", (48,), "L40S",
        _rates(362, tf32=183, fp32=91.6, fp8=733), "L40S data sheet", has_ecc=True),
    GPUModel("l40", (48,), "L40",
        _rates(181, tf32=90.5, fp32=90.5, fp8=362), "L40 data sheet", has_ecc=True),
    GPUModel("l4" + _END, (24,), "L4",
        _rates(121, tf32=60, fp32=30.3, fp8=242.5), "L4 data sheet", has_ecc=True),
    GPUModel("v100", (16, 32), _V100.format("SXM2"),
        {"fp16": 125, "fp32": 15.7, "fp64": 7.8}, "V100 data sheet, NVLink"),
    GPUModel("v100", (16, 32), _V100.format("PCIE"),
        {"fp16": 112, "fp32": 14, "fp64": 7}, "V100 data sheet, PCIe"),
    GPUModel("p100", (16, 12)),
    GPUModel("p40" + _END, (24,), has_ecc=True),
    GPUModel("t4" + _END, (16,), "T4", {"fp16": 65, "fp32": 8.1}, "T4 data sheet", has_ecc=True),
    GPUModel("k80", (12,), has_ecc=True),
    GPUModel("rtx.?6000.?ada|rtx.?a6000|a6000", (48,)),
    GPUModel("rtx.?pro.?6000", (96,), _PRO + "Workstation Edition",
        _rates(503.8, tf32=251.9, fp32=126, fp8=1007.6), _PRO_PAPER),
    GPUModel("rtx.?pro.?6000", (96,), _PRO + "Max-Q Workstation Edition",
        _rates(438.9, tf32=219.5, fp32=109.7, fp8=877.9), _PRO_PAPER),
    GPUModel("rtx.?6000|rtx.?a5000|a5000", (24,)),
    GPUModel("5090", (32,), "GeForce RTX 5090",
        _rates(209.5, tf32=104.8, fp32=104.8, fp8=419), "RTX Blackwell white paper, FP32 accumulate"),
    GPUModel("4090", (24, 48), "GeForce RTX 4090",
        _rates(165.2, tf32=82.6, fp32=82.6, fp8=330.3), "Ada architecture white paper, FP32 accumulate"),
    GPUModel("3090", (24,), "GeForce RTX 3090",
        _rates(71, tf32=35.6, fp32=35.6), "GA102 architecture white paper, FP32 accumulate"),
    GPUModel("2080.?ti", (11,)),
    GPUModel("2080", (8,)),
    GPUModel("titan.?rtx", (24,)),
    GPUModel("titan", (12,)),
    GPUModel("mi355", (288,)),
    GPUModel("mi325", (256,)),
    GPUModel("mi300x", (192,), r"Instinct MI300X(?: OAM)?",
        _rates(1307.4, tf32=653.7, fp32=163.4, fp64=163.4, fp8=2614.9), "MI300X data sheet; ROCm not tested"),
    GPUModel("mi300", (128,)),
    GPUModel("mi250|mi210", (64, 128)),
    GPUModel("mi100", (32,)),
)  # fmt: skip
_VENDOR = re.compile(r"^(?:NVIDIA |Tesla |AMD )+")
#: Before a model's name: no letters of another word, as in ``opa100``, except a vendor's name.
_BEFORE = r"(?<![a-z0-9])(?:\d+x)?(?:nvidia|amd|tesla|quadro|geforce|gpu|rtx|gtx)*"
#: ``a100-80gb``, ``a100_80g``, ``v100-32``, ``gpu80gb``.
_WRITTEN = re.compile(
    r"(?:(?<![a-z0-9])|(?<=gpu))(\d{1,3})\s*gb(?![a-z0-9])"
    r"|[-_ ](\d{2,3})g(?![a-z0-9])"
    r"|[-_](\d{2,3})(?![a-z0-9.])"
)
#: A slice of a GPU, whose name contains its memory: ``1g.10gb``.
_MIG = re.compile(r"(?<![0-9])\dg\.(\d{1,3})gb")
_IS_GPU = re.compile(r"(?<![a-z0-9])gpu")
#: Maximum of any GPU: a larger size belongs to a disk or the node.
_MOST_GIB = 288


def peak_tflops(device: str, precision: str) -> float | None:
    """Return the peak of a device by the driver's name for it; None if it is not in the table."""
    model = _driver_model(device)
    return None if model is None else model.tflops.get(precision)


def described(device: str) -> str:
    """Return the driver's name of a GPU with its peak, as ``doctor`` shows it."""
    model = _driver_model(device)
    if model is None:
        return f"{device} (peak unknown, so rows have no mfu)"
    precision = "bf16" if "bf16" in model.tflops else "fp16"
    return f"{device} ({model.tflops[precision]:g} TFLOP/s in {precision} by the {model.source})"


def _driver_model(device: str) -> GPUModel | None:
    name = _VENDOR.sub("", device)
    return next((model for model in GPU_MODELS if model.names and re.fullmatch(model.names, name)), None)


def gpu_memory_gib(name: str) -> float | None:
    """Return the memory that nvidia-smi shows for a GPU of this name; None if it is unknown.

    Uses the size in the name or, without one, the smallest variant of the model. For a constraint with
    several names, such as ``a100|h100``, returns the smallest known size.
    """
    sizes = [gib for part in re.split(r"[|&,]", name.lower()) if (gib := _memory_of_one(part)) is not None]
    return min(sizes, default=None)


def _memory_of_one(lower: str) -> float | None:
    """Return the size in a name if the name is a GPU's: other features have sizes as well."""
    if piece := _MIG.search(lower):
        return int(piece[1])
    written = [match.groups() for match in _WRITTEN.finditer(lower)]
    for model in GPU_MODELS:
        if re.search(f"{_BEFORE}(?:{model.sites})", lower):
            return model.gib([int(size) for groups in written for size in groups if size])
    with_unit = [int(gb or g) for gb, g, _ in written if gb or g]
    is_gpu = _IS_GPU.search(lower) is not None
    return next((size for size in with_unit if is_gpu and size <= _MOST_GIB), None)


@dataclass(frozen=True)
class Device:
    """The device of a rank."""

    #: Description for the plan.
    name: str
    is_gpu: bool
    #: As nvidia-smi shows it; None: unknown.
    memory_bytes: int | None
    #: Why the memory is unknown, and how to make it known.
    remedy: str = ""
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
    gpu = None if device == "cpu" else _local_gpu()
    if gpu is not None:
        return gpu
    if device == "cuda":
        remedy = "nvidia-smi shows no GPU here; plan on the machine that trains"
        return Device("GPU", is_gpu=True, memory_bytes=None, remedy=remedy)
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    assert match is not None, "Linux has it"
    return Device("CPU of this machine", is_gpu=False, memory_bytes=int(match[1]) * 1024 // ranks)


def _local_gpu() -> Device | None:
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
