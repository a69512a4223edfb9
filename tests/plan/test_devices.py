from __future__ import annotations

import pytest

from hpc_train.plan.devices import Device, device_here, gpu_memory_gib


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
        ("l4_24gb", 24),
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
def test_names_of_gpus_say_their_memory(name: str, gib: int | None) -> None:
    assert gpu_memory_gib(name) == gib


@pytest.mark.parametrize(
    "name", ["mem384gb", "mem_256g", "ssd_480gb", "100gbe", "opa100", "pool4", "part4", "intel4", "gpu-16"]
)
def test_other_features_of_nodes_are_no_memory_of_a_gpu(name: str) -> None:
    assert gpu_memory_gib(name) is None


def test_a_gpu_that_no_driver_describes_has_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert device_here("cuda", 2) == Device("GPU", is_gpu=True, memory_bytes=None)
