"""Which questions ``plan`` asks about memory, with the child replaced; ring volumes by hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan import prediction
from hpc_train.experiment.plan.devices import Device
from hpc_train.experiment.plan.prediction import StepPrediction, communication, predict
from hpc_train.experiment.topology.degrees import Degrees
from tests.plan.files import loaded, plan_here

_DEVICE = Device("GPU", is_gpu=True, memory_bytes=10**11)
_ANSWER = {"parts": {"parameters": 10**6}, "micro_batch_size": 8}


class Answering:
    """In place of the child: keeps the questions."""

    def __init__(self) -> None:
        self.questions: list[dict[str, Any]] = []

    def call(self, function: str, question: dict[str, Any], limit_s: float) -> Any:
        self.questions.append(question)
        return _ANSWER


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Answering:
    answering = Answering()
    monkeypatch.setattr(prediction, "one_child", lambda: nullcontext(answering))
    return answering


def predicted(folder: Path, *overrides: str, ranks: int = 2) -> list[StepPrediction]:
    return predict(plan_here(loaded(folder, *overrides), ranks).runs, lambda run: _DEVICE)


@pytest.mark.parametrize(
    "parameters",
    [
        "optimization.optimizer.weight_decay: {uniform: [0.01, 0.1]}",
        "optimization.optimizer.lr: {log_uniform: [0.001, 0.1]}",
        "optimization.optimizer.args.eps: {log_uniform: [1.0e-9, 1.0e-7]}",
        "optimization.schedule.warmup_epochs: {uniform: [0.1, 1]}",
        "optimization.epochs: {choice: [2, 3, 4]}",
        "optimization.label_smoothing: {uniform: [0.05, 0.2]}",
        "optimization.mixup: {uniform: [0.1, 0.9]}",
        "optimization.clip_grad_norm: {uniform: [0.1, 0.9]}",
        "data.augment.hflip: {uniform: [0.1, 0.9]}",
        "seed: {choice: [1, 2, 3, 4]}",
    ],
)
def test_draws_of_equal_memory_are_one_question(tmp_path: Path, parameters: str, child: Answering) -> None:
    draws = f"sweep.random={{count: 6, parameters: {{{parameters}}}}}"
    found = predicted(tmp_path, "optimization.optimizer={name: adamw, lr: 0.001}", draws)
    assert len(found) > 1
    assert all(each.memory for each in found)
    assert len(child.questions) == 1
    Experiment.model_validate(child.questions[0]["experiment"])


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optimization.optimizer.weight_decay", "[0.0, 0.1]"),
        ("optimization.ema", "[null, {decay: 0.9}]"),
        ("optimization.micro_batch_size", "[2, 4]"),
        ("activation_checkpointing", "[off, blocks]"),
    ],
)
def test_memory_keys_are_another_question(tmp_path: Path, key: str, values: str, child: Answering) -> None:
    predicted(tmp_path, f"sweep.grid={{{key}: {values}}}")
    assert len(child.questions) == 2


def test_runs_after_the_limit(tmp_path: Path, child: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_TOTAL_S", 0.0)
    first, second = predicted(tmp_path, "sweep.grid={optimization.micro_batch_size: [2, 4]}")
    assert first.memory is not None
    assert second.memory is None and (second.problem or "").startswith("not predicted: ")


def test_a_pipeline_of_fewer_micro_batches_than_ranks_is_predicted(tmp_path: Path, child: Answering) -> None:
    pipeline = ("parallel.strategy=pipeline", "optimization.global_batch_size=16")
    (found,) = predicted(tmp_path, *pipeline, ranks=4)
    assert (found.problem, found.micro_batch_size) == (None, 8)
    assert child.questions[0]["sizes"] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("overrides", "ranks", "problem"),
    [
        ((), 8, "micro_batch_size: 8 leaves ranks without a micro-batch"),
        (
            ("parallel={strategy: pipeline, schedule: interleaved}", "optimization.global_batch_size=40"),
            2,
            "parallel.schedule: interleaved runs micro-batches of 2 ranks in 2 equal rounds",
        ),
    ],
)
def test_a_size_that_no_step_can_have_is_not_predicted(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, problem: str, child: Answering
) -> None:
    (found,) = predicted(tmp_path, *overrides, ranks=ranks)
    assert (found.problem or "").startswith(problem)
    assert not child.questions


@pytest.mark.parametrize(
    ("parallel", "ranks", "communicators"),
    [
        ("{strategy: ddp}", 1, 0),
        ("{strategy: ddp}", 4, 1),
        ("{strategy: fsdp}", 4, 1),
        ("{strategy: hsdp, shard: 2, replicate: 2}", 4, 3),
        ("{strategy: tensor, tensor: 2}", 4, 3),
    ],
)
def test_the_limit_leaves_room_for_a_communicator_per_axis(
    tmp_path: Path, parallel: str, ranks: int, communicators: int, child: Answering
) -> None:
    (found,) = predicted(tmp_path, f"parallel={parallel}", ranks=ranks)
    assert found.device.communicators == communicators
    assert child.questions[0]["limit_bytes"] == found.device.limit_bytes


GB = 10**9


@pytest.mark.parametrize(
    ("strategy", "degrees", "per_node", "sent", "within_node_gb", "between_nodes_gb"),
    [
        ("ddp", Degrees(replicate=16), 8, {"all_reduce": GB}, 0, 2 * 15 / 16),
        ("zero1", Degrees(shard=4), 4, {"all_reduce": GB, "all_gather": GB}, 2 * 3 / 4 + 3 / 4, 0),
        (
            *("hsdp", Degrees(replicate=2, shard=8), 8, {"all_gather": 2 * GB, "reduce_scatter": GB}),
            *(7 / 8 * 3, 2 * (1 / 2) * 1 / 8),
        ),
        # Layers are shared within a node; stages send between nodes.
        ("pipeline", Degrees(pipeline=2, tensor=4), 4, {"tensor_all_reduce": GB, "send": GB}, 2 * 3 / 4, 1),
        ("fsdp", Degrees(), 1, {"all_gather": GB, "reduce_scatter": GB}, 0, 0),
    ],
)
def test_ring_volumes(
    strategy: str, degrees: Degrees, per_node: int, sent: dict[str, int], within_node_gb: float,
    between_nodes_gb: float,
) -> None:  # fmt: skip
    volume = communication(strategy, degrees, per_node, sent)
    assert volume.within_node_gb == pytest.approx(within_node_gb)
    assert volume.between_nodes_gb == pytest.approx(between_nodes_gb)


def test_kinds_of_collectives_are_separate() -> None:
    volume = communication("zero1", Degrees(shard=4), 4, {"all_reduce": GB, "all_gather": GB})
    assert (volume.all_reduce_gb, volume.all_gather_gb) == (2 * 3 / 4, 3 / 4)
