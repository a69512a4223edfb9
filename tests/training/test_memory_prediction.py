"""Predicted parts of small models, compared with numbers by hand and with two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory_prediction as measurement
from benchmarks.memory_prediction import Model, error, measure, predicted
from hpc_train.config.schema import Experiment
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.topology.degrees import Degrees, find_degrees
from hpc_train.training.memory_prediction import PredictedStep
from hpc_train.training.planned_data import PlannedData
from hpc_train.training.predicted_runs import RunQuestion, largest_fitting

FEATURES, CLASSES, BATCH = 64, 32, 8
#: Of digits, one channel of 32 × 32.
PIXELS = 1024
WEIGHTS = (FEATURES * CLASSES + CLASSES) * 4
#: A gpt that two ranks share and cut, in 64 tokens of 100 words.
_GPT = {"num_layers": 2, "dim": 64, "num_heads": 2, "tie_embeddings": False}
_TOKENS = torch.zeros(1, 64, dtype=torch.int64)
SMALL = Model(
    "gpt",
    _GPT,
    "causal_lm",
    DataInfo(100, 0, (), (), sequence_length=64),
    Batch(0, 0, 1.0, _TOKENS, _TOKENS.clone(), torch.ones(1, dtype=torch.bool)),
    4,
)


class Linear(nn.Module):
    def __init__(self, num_classes: int, needs_data: bool = False, features: int = FEATURES) -> None:
        super().__init__()
        self.head = nn.Linear(features, num_classes)
        self.needs_data = needs_data

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.needs_data and images_BCHW.sum() > 0:
            raise ValueError("never")
        out: Tensor = self.head(images_BCHW.flatten(1))
        return out


def experiment(**changes: Any) -> Experiment:
    optimization = {"global_batch_size": 32, "micro_batch_size": BATCH, "steps": 2}
    optimization["optimizer"] = changes.pop("optimizer", {"name": "adam", "lr": 1e-3})
    optimization |= changes.pop("optimization", {})
    return Experiment.model_validate({
        "name": "memory",
        "task": "classification",
        "model": {"name": f"{__name__}:Linear"},
        "data": {"name": "synthetic"},
        "optimization": optimization,
        **changes,
    })  # fmt: skip


def step(config: Experiment, ranks: int = 1, rank: int = 0, *, is_on_gpu: bool = False) -> PredictedStep:
    info = DataInfo(CLASSES, 1, (0.5,), (0.5,))
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    sample = Batch(0, 0, 1.0, images, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    degrees = find_degrees(config.parallel, ranks, ranks)
    assert isinstance(degrees, Degrees)
    return PredictedStep(config, info, sample, 10**6, degrees, rank, is_on_gpu)


def parts(config: Experiment, ranks: int = 1, **keys: Any) -> dict[str, int]:
    return step(config, ranks, **keys).predict().parts


def test_a_linear_layer_under_adam_on_one_rank() -> None:
    found = parts(experiment())
    # Adam: two averages, and a step of 4 bytes for weight and bias each.
    assert (found["parameters"], found["optimizer"]) == (WEIGHTS, 2 * WEIGHTS + 8)
    assert found["gradients"] in (0, WEIGHTS)  # at the forward's end, or later
    assert found["buffers"] == 0


def test_sgd_without_momentum_has_no_state() -> None:
    assert parts(experiment(optimizer={"name": "sgd", "lr": 0.1}))["optimizer"] == 0


def test_averages_are_weights_too() -> None:
    found = parts(experiment(optimization={"ema": {"decay": 0.9}}))
    assert found["parameters"] == 2 * WEIGHTS


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer"),
    [("ddp", 1, 1), ("zero1", 1, 1 / 2), ("zero2", 1 / 2, 1 / 2), ("fsdp", 1 / 2, 1 / 2)],
)
def test_strategies_shard_their_parts(strategy: str, parameters: float, optimizer: float) -> None:
    found = parts(experiment(parallel={"strategy": strategy}), ranks=2)
    assert found["parameters"] == WEIGHTS * parameters
    assert found["optimizer"] == pytest.approx(2 * WEIGHTS * optimizer, abs=8)


def test_many_shards_are_computed_from_few() -> None:
    fsdp = {"strategy": "fsdp"}
    batch = {"global_batch_size": 16 * BATCH}
    found = parts(experiment(parallel=fsdp, optimization=batch), ranks=16)
    assert found["parameters"] == WEIGHTS / 16
    assert found["optimizer"] == pytest.approx(2 * WEIGHTS / 16, abs=8)


def test_ddp_keeps_buckets_besides_the_gradients_of_a_step_in_parts() -> None:
    ddp = {"strategy": "ddp"}
    one, two = (
        parts(experiment(parallel=ddp, optimization={"global_batch_size": size * 2 * BATCH}), ranks=2)
        for size in (1, 2)
    )
    assert (one["gradients"], two["gradients"]) == (WEIGHTS, 2 * WEIGHTS)


def test_communication_is_counted() -> None:
    fsdp = step(experiment(parallel={"strategy": "fsdp"}), ranks=2).predict().communicated
    # The root's parameters stay gathered between forward and backward: once per micro-batch, of which two.
    assert (fsdp["all_gather"], fsdp["reduce_scatter"]) == (2 * WEIGHTS, WEIGHTS)
    assert step(experiment(), ranks=2).predict().communicated["all_reduce"] == WEIGHTS


def test_gpu_sizes_are_whole_blocks() -> None:
    found = parts(experiment(), is_on_gpu=True)
    assert found["parameters"] == -(-FEATURES * CLASSES * 4 // 512) * 512 + 512


def test_a_forward_that_needs_data_leaves_the_other_parts() -> None:
    config = experiment(model={"name": f"{__name__}:Linear", "args": {"needs_data": True}})
    question, one = RunQuestion(config, Degrees(), False, None, [BATCH]), step(config)
    question.__dict__["data"] = PlannedData(one.info, one.sample, one.num_samples)
    answer = question.answer()
    assert answer["problem"].startswith("activations are unknown: DataDependentOutputException")
    found = answer["parts"]
    assert (found["parameters"], found["gradients"]) == (WEIGHTS, WEIGHTS)
    assert found["optimizer"] == 2 * WEIGHTS + 8
    assert (answer["flops_per_sample"], answer["communicated"]) == (None, {})


def test_a_question_is_answered_from_the_file_alone() -> None:
    config = experiment(
        data={"name": "digits"}, model={"name": f"{__name__}:Linear", "args": {"features": PIXELS}}
    )
    settings = config.model_dump(mode="json")
    answer = RunQuestion.of({
        "experiment": settings, "degrees": {}, "is_on_gpu": False, "limit_bytes": 10**9, "sizes": [1, 8, 32]
    }).answer()  # fmt: skip
    assert answer["problem"] is answer["assumption"] is None
    assert (answer["micro_batch_size"], answer["largest"]) == (8, 32)
    # Twice forward, and backward for the weights alone: the input has no gradient.
    assert answer["flops_per_sample"] == 2 * 2 * PIXELS * 10


def test_the_largest_size_is_found_in_few_calls() -> None:
    sizes, calls = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96], []

    def total(size: int) -> int:
        calls.append(size)
        return 1000 + 10 * size

    assert largest_fitting(sizes, 8, total, 1000 + 10 * 50) == 48
    assert len(calls) <= 4
    assert largest_fitting(sizes, 8, total, 999) is None
    assert largest_fitting(sizes, 8, total, 10**9) == 96
    assert largest_fitting(sizes, 8, lambda size: None, 10**9) is None


@pytest.mark.slow
def test_predictions_are_within_a_tenth_of_what_two_ranks_measure() -> None:
    cases = [
        (SMALL, measurement.experiment_of(SMALL, strategy, checkpointing))
        for strategy, checkpointing in [
            ("ddp", "off"), ("fsdp", "blocks"), ("zero1", "off"), ("tensor", "off"), ("pipeline", "off")
        ]
    ]  # fmt: skip
    by_rank = measure(cases)
    for number, (model, config) in enumerate(cases):
        for rank in range(measurement.RANKS):
            errors = error(predicted(model, config, rank), by_rank[rank][number])
            assert max(map(abs, errors.values())) < 0.1, (config.parallel.strategy, rank, errors)
