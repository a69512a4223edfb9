"""The predicted peak of a step, compared with what CUDA's allocator counts. One rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_parts import measured_peak, predicted_peak
from benchmarks.memory_prediction import GPT, MODELS, experiment_of
from tests import fake_cuda
from tests.gpu.test_gpu import on_gpu

#: What cuBLAS and cuDNN take for themselves through torch's allocator, which no operator returns (assumed).
_WORKSPACES = 200e6


@on_gpu
@pytest.mark.alone
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", [GPT, "ViT-B, 4 blocks"])
def test_the_prediction_is_within_a_tenth_of_the_allocators_peak(
    name: str, strategy: str, precision: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = experiment_of(MODELS[name], strategy, "off").model_copy(update={"precision": precision})
    predicted = predicted_peak(name, config)
    store = tmp_path_factory.mktemp("store") / "store"
    backend = "gloo" if fake_cuda.is_here() else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    try:
        measured = measured_peak(name, config, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
    assert predicted < measured * 1.1
    assert predicted > (measured - _WORKSPACES) * 0.9
