"""The memory and peak rates of GPUs by their names, and what a step may take of a device's memory."""

from __future__ import annotations

import pytest

from hpc_train.experiment.plan.devices import (
    GPU_MODELS,
    Device,
    described,
    device_here,
    gpu_memory_gib,
    peak_tflops,
)

GIB = 2**30


def limit_gib(memory_gib: float, communicators: int = 0) -> float:
    limit = Device("GPU", True, int(memory_gib * GIB), communicators=communicators).limit_bytes
    assert limit is not None
    return limit / GIB


#: nvidia-smi's size and torch's total capacity. Of the H200 measured, of the others read in public reports of
#: OutOfMemoryError.
@pytest.mark.parametrize(
    ("memory", "total"), [(140.4, 139.8), (80.0, 79.15), (44.99, 44.53), (24.0, 23.53), (15.0, 14.56)]
)
def test_a_prediction_too_low_by_a_tenth_fits_beside_what_cuda_takes(memory: float, total: float) -> None:
    limit = limit_gib(memory)
    assert limit / 0.9 + 1.4 < total
    assert limit > 0.8 * memory - 1.5, "nor is it wasted"


def test_a_tenth_of_a_small_gpu_is_too_little() -> None:
    """NCCL and CUDA take as much of a T4 as of an H200."""
    assert limit_gib(15) < 0.9 * 16 - 2
    assert limit_gib(140.4) == pytest.approx(0.9 * 140.4, abs=3)
    # ConvNeXt-B with micro-batches of 1,024 ran on it: predicted 123 GB, took 126 GB.
    assert limit_gib(140.4) * GIB > 123e9


def test_each_communicator_takes_its_buffers() -> None:
    assert limit_gib(80, 0) - limit_gib(80, 3) == pytest.approx(3 * 0.45)


def test_ranks_on_a_cpu_have_neither() -> None:
    cpu = Device("CPU", is_gpu=False, memory_bytes=10 * GIB, communicators=2)
    assert cpu.limit_bytes == 9 * GIB
    assert Device("GPU", is_gpu=True, memory_bytes=None).limit_bytes is None
    assert Device("GPU", is_gpu=True, memory_bytes=GIB).limit_bytes == 0


def test_a_gpu_that_no_driver_describes_has_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    device = device_here("cuda", 2)
    assert (device.name, device.is_gpu, device.memory_bytes) == ("GPU", True, None)


#: Memory in GiB of the names that Slurm, torch and sites use.
MEMORY: dict[float | None, tuple[str, ...]] = {
    8: ("rtx_2080",),
    10: ("nvidia_a100_1g.10gb", "1g.10gb"),
    11: ("rtx_2080_ti", "rtx2080ti"),
    12: ("titan",),
    15: ("t4",),
    16: ("h100|v100&infiniband",),
    22.5: ("l4_24gb", "NVIDIA A10G"),
    24: ("gpu:rtx_4090:4", "rtx6000", "titan_rtx", "rtx4090"),
    32: ("v100-32g", "v100-32"),
    40: ("a100", "a100|h100", "a100-sxm4-mem256gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100&mem384gb"),
    45: ("l40s",),
    48: ("rtx_6000_ada",),
    64: ("mi250",),
    80: (
        "nvidia_a100-sxm4-80gb", "a100_80g", "h100", "NVIDIA H100 80GB HBM3", "a100_80", "8xh100", "gpu80gb",
        "gh200_480gb|a100_80gb",
    ),
    96: ("h20", "rtx_pro_6000", "NVIDIA GH200 480GB", "nvidia_gh200_120gb", "gh200_96gb"),
    141: ("h20-3e_141gb",),
    144: ("gh200-144", "NVIDIA GH200 144G HBM3e"),
    179: ("b200_192gb",),
    184: ("gb200",),
    192: ("AMD Instinct MI300X",),
    # Unknown, and other features of nodes, whose sizes are not those of a GPU.
    None: (
        "quantum", "mem384gb", "mem_256g", "ssd_480gb", "100gbe", "opa100", "pool4", "part4", "intel4",
        "gpu-16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gib", "name"), [(gib, name) for gib, names in MEMORY.items() for name in names])
def test_names_of_gpus_say_their_memory(name: str, gib: float | None) -> None:
    assert gpu_memory_gib(name) == gib


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-SXM4-40GB", "fp16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GH200 480GB", "bf16", 990),
        ("NVIDIA GB200", "fp8", 5000),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250),
        ("NVIDIA H20", "fp8", 296),
        ("NVIDIA H800", "bf16", 989),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        # Others than they seem, and what a device does not have.
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("", "fp32", None),
    ],
)
def test_peaks_are_of_whole_names(device: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(device, precision) == peak


def test_every_peak_has_a_source_and_precisions_of_the_file() -> None:
    precisions = {"bf16", "fp16", "tf32", "fp32", "fp64", "fp8"}
    assert all(bool(model.source) == bool(model.names) == bool(model.tflops) for model in GPU_MODELS)
    assert all(model.tflops.keys() <= precisions for model in GPU_MODELS)


def test_a_gpu_is_described_with_its_peak() -> None:
    assert described("NVIDIA H200") == "NVIDIA H200 (989 TFLOP/s in bf16 by the H200 data sheet, SXM)"
    assert "in fp16" in described("Tesla T4")
    assert described("Quantum") == "Quantum (peak unknown, so rows have no mfu)"
