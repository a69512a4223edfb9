"""The peak rate of GPUs, for model FLOPs utilization (MFU). Without torch: benchmarks' pages read it, too."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of one model of GPU by ``precision:``, dense (without sparsity), at boost clock."""

    #: A regular expression of the whole name that the driver reports, without the vendor.
    names: str
    tflops: dict[str, float]
    #: The vendor's document.
    source: str


def _half(rate: float, **others: float) -> dict[str, float]:
    """Return the rates of a GPU whose bf16 and fp16 are equally fast."""
    return {"bf16": rate, "fp16": rate, **others}


#: One row per model. fp64 is that of the tensor cores, where they have it. Names that fit no row, such as a
#: MIG slice's or a laptop's, have no peak.
PEAKS = (
    Peak(r"B200", _half(2250, tf32=1125, fp32=75, fp64=37, fp8=4500), "HGX B200 data sheet, an eighth"),
    Peak(r"H200", _half(989, tf32=495, fp32=67, fp64=67, fp8=1979), "H200 data sheet, SXM"),
    Peak(r"H200 NVL", _half(835.5, tf32=417.5, fp32=60, fp64=60, fp8=1670.5), "H200 data sheet, NVL"),
    Peak(r"H100 80GB HBM3", _half(989, tf32=495, fp32=67, fp64=67, fp8=1979), "H100 data sheet, SXM"),
    Peak(r"H100 PCIe", _half(756.5, tf32=378, fp32=51, fp64=51, fp8=1513), "H100 data sheet, 2022, PCIe"),
    Peak(r"H100 NVL", _half(835.5, tf32=417.5, fp32=60, fp64=60, fp8=1670.5), "H100 data sheet, NVL"),
    Peak(
        r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe",
        _half(312, tf32=156, fp32=19.5, fp64=19.5),
        "A100 data sheet",
    ),
    Peak(r"A30", _half(165, tf32=82, fp32=10.3, fp64=10.3), "A30 data sheet"),
    Peak(r"A40", _half(149.7, tf32=74.8, fp32=37.4), "A40 data sheet"),
    Peak(r"A10", _half(125, tf32=62.5, fp32=31.2), "A10 data sheet"),
    Peak(r"L40S", _half(362, tf32=183, fp32=91.6, fp8=733), "L40S data sheet"),
    Peak(r"L4", _half(121, tf32=60, fp32=30.3, fp8=242.5), "L4 data sheet"),
    Peak(r"V100-SXM2-(16|32)GB", {"fp16": 125, "fp32": 15.7, "fp64": 7.8}, "V100 data sheet, NVLink"),
    Peak(r"V100-PCIE-(16|32)GB", {"fp16": 112, "fp32": 14, "fp64": 7}, "V100 data sheet, PCIe"),
    Peak(r"T4", {"fp16": 65, "fp32": 8.1}, "T4 data sheet"),
    Peak(
        r"GeForce RTX 4090",
        _half(165.2, tf32=82.6, fp32=82.6, fp8=330.3),
        "Ada architecture white paper, FP32 accumulate",
    ),
    Peak(
        r"GeForce RTX 3090",
        _half(71, tf32=35.6, fp32=35.6),
        "GA102 architecture white paper, FP32 accumulate",
    ),
)
_VENDOR = re.compile(r"^(?:NVIDIA |Tesla )+")


def peak_tflops(device: str, precision: str) -> float | None:
    """Return the peak of the device of this name at ``precision:``; None if it is not in the table."""
    name = _VENDOR.sub("", device)
    found = next((peak for peak in PEAKS if re.fullmatch(peak.names, name)), None)
    return None if found is None else found.tflops.get(precision)
