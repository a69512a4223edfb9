from __future__ import annotations

import pytest

from hpc_train.plan.devices import GPU_MODELS, described, gpu_memory_gib, peak_tflops


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("a100", 40),
        ("nvidia_a100-sxm4-80gb", 80),
        ("a100_80g", 80),
        ("h100", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("v100-32g", 32),
        ("nvidia_a100_1g.10gb", 10),
        ("gpu:rtx_4090:4", 24),
        ("mi250", 64),
        ("quantum", None),
        ("rtx6000", 24),
        ("rtx_6000_ada", 48),
        ("titan", 12),
        ("rtx_2080", 8),
        ("rtx_2080_ti", 11),
        ("a100|h100", 40),
        ("h100|v100&infiniband", 16),
        ("a100_80", 80),
        ("v100-32", 32),
        ("titan_rtx", 24),
        ("rtx4090", 24),
        ("rtx2080ti", 11),
        ("l4_24gb", 22.5),
        ("NVIDIA A10G", 22.5),
        ("t4", 15),
        ("l40s", 45),
        ("b200_192gb", 179),
        ("h20", 96),
        ("h20-3e_141gb", 141),
        ("gb200", 184),
        ("a100-sxm4-mem256gb", 40),
        ("rtx_pro_6000", 96),
        ("AMD Instinct MI300X", 192),
        ("8xh100", 80),
        ("gpu80gb", 80),
        ("1g.10gb", 10),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40),
        ("NVIDIA GH200 480GB", 96),
        ("nvidia_gh200_120gb", 96),
        ("gh200_96gb", 96),
        ("gh200-144", 144),
        ("NVIDIA GH200 144G HBM3e", 144),
        ("gh200_480gb|a100_80gb", 80),
        ("a100&mem384gb", 40),
    ],
)
def test_names_of_gpus_say_their_memory(name: str, gib: float | None) -> None:
    assert gpu_memory_gib(name) == gib


@pytest.mark.parametrize(
    "name", ["mem384gb", "mem_256g", "ssd_480gb", "100gbe", "opa100", "pool4", "part4", "intel4", "gpu-16"]
)
def test_other_features_of_nodes_are_no_memory_of_a_gpu(name: str) -> None:
    assert gpu_memory_gib(name) is None


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
