from __future__ import annotations

import pytest

from hpc_train.plan.devices import gpu_memory_gib


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
    ],
)
def test_names_of_gpus_say_their_memory(name: str, gib: int | None) -> None:
    assert gpu_memory_gib(name) == gib
