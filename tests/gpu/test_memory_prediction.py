"""The predicted peak of a step, compared with what CUDA's allocator counts. One rank."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory_prediction import GPT, MODELS, experiment_of
from hpc_train.config.schema import Experiment
from hpc_train.distributed.precision import choose_precision
from hpc_train.strategies.base import RankContext
from hpc_train.tasks.base import make_task
from hpc_train.topology.batch_arithmetic import BatchArithmetic
from hpc_train.topology.degrees import Degrees
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.memory_prediction import PredictedStep
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.train_state import build
from tests.gpu.test_gpu import on_gpu

_NUM_SAMPLES = 10**6
#: What cuBLAS and cuDNN take for themselves through torch's allocator, which no operator returns (assumed).
_WORKSPACES = 200e6


def _measured(name: str, config: Experiment, device: torch.device) -> int:
    model = MODELS[name]
    degrees = Degrees()
    context = RankContext(
        0, degrees, device, choose_precision(config.precision, device), parallel=config.parallel
    )
    arithmetic = BatchArithmetic.of(config.optimization, _NUM_SAMPLES, 1)
    state = build(config, model.info, arithmetic, context)
    task = make_task(config, model.info)
    to_input = make_to_input(config, model.info, device, context.precision)
    forward = TrainingForward.of(config, state, task, context.precision, device, to_input)
    guard = Guard(config.optimization, state.model, norm_counts=False)
    whole = replace(model.sample.repeated(model.micro_batch_size), weight=1 / arithmetic.micro_batches)
    batches = [replace(whole, number=slot) for slot in range(2)]
    state.wrapped.train()
    train_step(state, 0, batches, forward, guard, None)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    train_step(state, 1, batches, forward, guard, None)
    return torch.cuda.max_memory_allocated(device)


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", [GPT, "ViT-B, 4 blocks"])
def test_the_prediction_is_within_a_tenth_of_the_allocators_peak(
    name: str, strategy: str, precision: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, device = MODELS[name], torch.device("cuda", 0)
    config = experiment_of(model, strategy, "off").model_copy(update={"precision": precision})
    step = PredictedStep(config, model.info, model.sample, _NUM_SAMPLES, Degrees(), 0, is_on_gpu=True)
    predicted = step.predict().total
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        measured = _measured(name, config, device)
    finally:
        dist.destroy_process_group()
    assert predicted < measured * 1.1
    assert predicted > (measured - _WORKSPACES) * 0.9
