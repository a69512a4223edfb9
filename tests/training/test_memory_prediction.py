"""Predicted parts of small models, compared with numbers by hand and with two real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import memory_prediction as measurement
from benchmarks.memory_prediction import Model, error, measure, predicted
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.prediction import PARTS
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.training import memory_prediction, predicted_runs
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.live_memory import LiveMemory
from hpc_train.training.memory_prediction import PredictedStep, Prediction
from hpc_train.training.predicted_runs import PlannedData, RunQuestion, largest_fitting, planned_data

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
    def __init__(
        self, num_classes: int, needs_data: bool = False, features: int = FEATURES, layers: int = 0
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(features, features) for _ in range(layers)))
        self.head = nn.Linear(features, num_classes)
        self.needs_data = needs_data

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.needs_data and images_BCHW.sum() > 0:
            raise ValueError("never")
        out: Tensor = self.head(self.layers(images_BCHW.flatten(1)))
        return out


class Normalized(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(images_BCHW).flatten(1))
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
    assert parts(experiment(optimizer={"name": "sgd", "lr": 0.1}))["optimizer"] == 0
    averaged = parts(experiment(optimization={"ema": {"decay": 0.9}}))
    assert averaged["parameters"] == 2 * WEIGHTS


@pytest.mark.parametrize(
    ("strategy", "ranks", "parameters", "optimizer"),
    [
        ("ddp", 2, 1, 1),
        ("zero1", 2, 1, 1 / 2),
        ("zero2", 2, 1 / 2, 1 / 2),
        ("fsdp", 2, 1 / 2, 1 / 2),
        ("fsdp", 16, 1 / 16, 1 / 16),  # computed from few shards
    ],
)
def test_strategies_shard_their_parts(strategy: str, ranks: int, parameters: float, optimizer: float) -> None:
    batch = {"global_batch_size": 16 * BATCH}
    found = parts(experiment(parallel={"strategy": strategy}, optimization=batch), ranks=ranks)
    assert found["parameters"] == WEIGHTS * parameters
    assert found["optimizer"] == pytest.approx(2 * WEIGHTS * optimizer, abs=8)


_BIG_GPT = _GPT | {"num_layers": 3, "dim": 256}
#: A block takes less than the optimizer's temporary results.
_LONG_GPT = _GPT | {"num_layers": 12}
_LORA = {"rank": 8, "targets": ["layers.*"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes", "ranks"),
    [
        pytest.param("fsdp", {"model": {"name": "gpt", "args": _LONG_GPT}}, 16, marks=pytest.mark.soak),
        (
            "fsdp",
            {
                "model": {"name": "gpt", "args": _LONG_GPT},
                "activation_checkpointing": "blocks",
                "precision": "bf16",
            },
            16,
        ),
        pytest.param(
            "fsdp", {"model": {"name": "gpt", "args": _BIG_GPT, "lora": _LORA}}, 16, marks=pytest.mark.soak
        ),
        ("zero1", {}, 8),
    ],
)
def test_few_shards_predict_what_all_of_them_take(
    strategy: str, changes: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment(
        task="causal_lm",
        parallel={"strategy": strategy},
        optimization={"global_batch_size": ranks, "micro_batch_size": 1},
        **{"model": {"name": "gpt", "args": _BIG_GPT}} | changes,
    )
    degrees = find_degrees(config.parallel, ranks, ranks)
    assert isinstance(degrees, Degrees)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    sample = replace(SMALL.sample, inputs=tokens, targets=tokens)
    planned = PredictedStep(config, SMALL.info, sample, 10**6, degrees, 0, is_on_gpu=True)
    few = planned.predict().parts
    monkeypatch.setattr(memory_prediction, "_MAX_SHARDS", ranks)
    every = planned.predict().parts
    assert sum(few.values()) == pytest.approx(sum(every.values()), rel=0.03)
    assert few["parameters"] == pytest.approx(every["parameters"], rel=0.03)
    for part in PARTS:
        assert few[part] == pytest.approx(every[part], abs=0.03 * sum(every.values()))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.soak)])
def test_a_long_pipeline_is_predicted_from_two_short_ones(schedule: str) -> None:
    config = experiment(
        task="causal_lm",
        model={"name": "gpt", "args": _GPT},
        parallel={"strategy": "pipeline", "schedule": schedule},
        optimization={"global_batch_size": 10, "micro_batch_size": 1},
    )
    long = PredictedStep(config, SMALL.info, SMALL.sample, 10**6, Degrees(pipeline=2), 0, is_on_gpu=True)
    assert long._is_long
    assert long.predict().total == pytest.approx(long._prediction(10).total, rel=0.01)


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


@pytest.mark.parametrize(("copies", "gathered"), [(False, 1), (True, 2)])
def test_gloo_gathers_into_a_copy(copies: bool, gathered: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with FakeTensorMode(), LiveMemory(copies_communicated=copies) as memory:
            memory.start()
            dist.all_gather_into_tensor(torch.empty(200), torch.empty(100))
            assert memory.peak()["buffers"] == 4 * (100 + gathered * 200)
    finally:
        dist.destroy_process_group()


def test_gpu_sizes_are_whole_blocks() -> None:
    found = parts(experiment(), is_on_gpu=True)
    assert found["parameters"] == -(-FEATURES * CLASSES * 4 // 512) * 512 + 512


def test_optimizers_update_all_parameters_at_once_on_a_gpu() -> None:
    model = {"name": f"{__name__}:Linear", "args": {"layers": 8}}
    adamax = {"name": "adamax", "lr": 1e-3, "weight_decay": 0.1}
    on_cpu, on_gpu = (
        parts(experiment(model=model, optimizer=adamax), is_on_gpu=is_on_gpu) for is_on_gpu in (False, True)
    )
    # At least the decayed gradients of all layers, and not of one.
    assert on_gpu["activations"] >= 8 * FEATURES * FEATURES * 4 > 2 * on_cpu["activations"]


def question_of(
    config: Experiment, data: PredictedStep, limit_bytes: int | None = None, sizes: Sequence[int] = (BATCH,)
) -> RunQuestion:
    """Return the question of a run on one rank whose data are those of ``data``."""
    question = RunQuestion(config, Degrees(), False, limit_bytes, list(sizes))
    question.__dict__["data"] = PlannedData(data.info, data.sample, data.num_samples)
    return question


def test_a_forward_that_needs_data_leaves_the_other_parts() -> None:
    config = experiment(model={"name": f"{__name__}:Linear", "args": {"needs_data": True}})
    answer = question_of(config, step(config)).answer()
    assert answer["problem"].startswith("activations are not predicted: the model's forward pass depends on")
    found = answer["parts"]
    assert (found["parameters"], found["gradients"]) == (WEIGHTS, WEIGHTS)
    assert found["optimizer"] == 2 * WEIGHTS + 8
    assert (answer["flops_per_sample"], answer["communicated"]) == (None, {})


def test_an_error_of_the_users_model_is_named_with_its_line() -> None:
    config = experiment(model={"name": f"{__name__}:Linear", "args": {"features": FEATURES + 1}})
    problem = question_of(config, step(experiment())).answer()["problem"]
    assert problem.startswith("activations are unknown: test_memory_prediction.py:")
    assert " in forward: RuntimeError: " in problem and "`hpc-train prepare`" in problem


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


def test_a_size_that_the_model_refuses_leaves_the_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment()
    question = question_of(config, step(config), 10, [4, BATCH])
    predict = RunQuestion.predicted

    def refusing(self: RunQuestion, size: int) -> Prediction:
        if size < BATCH:
            raise ValueError("Expected more than 1 value per channel when training")
        return predict(self, size)

    monkeypatch.setattr(RunQuestion, "predicted", refusing)
    answer = question.answer()
    assert (answer["problem"], answer["largest"]) == (None, None)
    assert answer["parts"]["parameters"] == WEIGHTS


def test_synchronised_batchnorm_is_predicted_as_batchnorm() -> None:
    model = {"name": f"{__name__}:Normalized"}
    whole, synchronised = (
        parts(experiment(model=model, parallel={"strategy": "ddp", "sync_batchnorm": on}), ranks=2)
        for on in (False, True)
    )
    assert synchronised == whole


def test_a_causal_model_of_transformers_stores_no_mask_and_its_flops_are_counted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = 512
    transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1
    ).save_pretrained(tmp_path)
    config = experiment(
        task="causal_lm",
        model={"name": f"hf/{tmp_path}"},
        optimization={"global_batch_size": 1, "micro_batch_size": 1},
    )
    zeros = torch.zeros(1, tokens, dtype=torch.int64)
    info = DataInfo(32, 0, (), (), sequence_length=tokens)
    sample = replace(SMALL.sample, inputs=zeros, targets=zeros)
    question = RunQuestion(config, Degrees(), True, None, [1])
    question.__dict__["data"] = PlannedData(info, sample, 10**6)
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs.get("attn_mask", args[3] if len(args) > 3 else None))
        return attention(*args, **kwargs)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", seen):
        answer = question.answer()
    assert answer["problem"] is None
    assert masks and all(mask is None for mask in masks)
    assert answer["flops_per_sample"] > 0


@pytest.mark.parametrize(
    ("name", "args", "classes"),
    [
        ("gpt", {"num_classes": 2048}, 2048),
        ("gpt", {"vocab_size": 300}, 300),
        ("gpt", {}, 50257),
        ("hf/causal-lm/config.json", {}, 1),
    ],
)
def test_the_vocabulary_of_missing_data_is_the_models(name: str, args: dict[str, Any], classes: int) -> None:
    config = experiment(
        task="causal_lm",
        model={"name": name, "args": args},
        data={"name": "tokens", "root": "/missing", "args": {"sequence_length": 16}},
    )
    assert planned_data(config).info.num_classes == classes


def test_images_of_unreadable_data_have_the_size_of_the_model() -> None:
    config = experiment(
        model={"name": "timm/test_vit", "args": {"img_size": 32}}, data={"name": "folder", "root": "/missing"}
    )
    assert planned_data(config).sample.inputs.shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("side", "data", "assumption", "problem"),
    [
        (32, {}, "assumed 1000 classes, images 3×32×32, ", None),
        (
            30,
            {},
            "assumed 1000 classes, images 3×224×224, ",
            "does not accept the assumed data (test_memory_prediction.py:",
        ),
        (32, {"image_size": 64}, "assumed 1000 classes, images 3×64×64, ", "; plan where the data are"),
    ],
    ids=["of CIFAR", "of no data", "in the file"],
)
def test_a_model_of_another_size_than_assumed_is_no_false_alarm(
    side: int, data: dict[str, Any], assumption: str, problem: str | None
) -> None:
    model = {"name": f"{__name__}:Linear", "args": {"features": 3 * side * side}}
    config = experiment(model=model, data={"name": "imagefolder", "root": "/missing", **data})
    answer = RunQuestion(config, Degrees(), False, None, [BATCH]).answer()
    assert answer["assumption"].startswith(assumption)
    assert answer["assumption"].endswith("(data.root: /missing is not a folder on this machine)")
    assert "prepare" not in str(answer["problem"])
    assert (answer["problem"] is None) if problem is None else (problem in answer["problem"])


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


def _node(
    start: int, end: int = 0, name: str = "", children: Sequence[Any] = (), memory: tuple[int, int] = (0, 0)
) -> SimpleNamespace:
    """Return an event of a profile. ``memory``: address and bytes of an allocation."""
    tag = _EventType.Allocation if memory[0] else _EventType.TorchOp
    fields = SimpleNamespace(ptr=memory[0], alloc_size=memory[1])
    return SimpleNamespace(
        start_time_ns=start, end_time_ns=end, name=name, children=children, tag=tag, extra_fields=fields
    )


def test_activations_of_detectors_are_not_predicted() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")
    config = experiment(
        task="detection",
        model={"name": "examples.small_fcos:small_fcos", "args": {"width": 32}},
        data={"name": "coco", "root": "/missing", "image_size": [32, 48]},
    )
    planned = planned_data(config)
    assert planned.assumption is not None
    assert planned.assumption.startswith("assumed 80 classes, images 3×32×48, because the data can't be read")
    answer = RunQuestion(config, Degrees(), False, None, [BATCH]).answer()
    assert "not predicted: the model's forward pass depends on the values of its inputs" in answer["problem"]
    assert answer["parts"]["parameters"] > 0 == answer["parts"]["activations"]


def test_weights_that_are_not_here_do_not_prevent_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(given: Experiment) -> Experiment:
        raise BadFileError("the weights are not available")

    monkeypatch.setattr(predicted_runs, "with_preprocessing", unavailable)
    settings = experiment(data={"name": "synthetic", "normalize": "weights"}).model_dump(mode="json")
    question = {"degrees": {}, "is_on_gpu": False, "limit_bytes": None, "sizes": [BATCH]}
    found = RunQuestion.of({"experiment": settings, **question}).experiment.data.normalize
    assert found is not None and found.mean == [0.5] * 3


@pytest.mark.parametrize("later", [[], [_node(9, memory=(7, 40))], [_node(6, memory=(7, -100))]])
def test_what_gloo_releases_unrecorded_ends_with_its_collective(later: list[Any]) -> None:
    copy = _node(2, memory=(7, 100))
    tree = [
        _node(0, 1, "gloo:all_gather"),
        _node(1, 3, "c10d::_reduce_scatter_base_", [copy]),
        _node(3, 5, "gloo:all_reduce"),
        *later,
    ]
    found = measurement._events(tree)
    is_recorded = any(node.extra_fields.alloc_size < 0 for node in later)
    assert [event for event in found if event[2] < 0] == [(6 if is_recorded else 5, 7, -100)]


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
