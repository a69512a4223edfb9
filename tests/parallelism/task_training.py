"""Cases of tasks on ranks, as the worker trains and evaluates them, and by a bare PyTorch loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import evaluation_batch_count, evaluation_batches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.random_numbers import seed_build, seed_forward
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.evaluation import evaluate
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.models.building import build_model
from hpc_train.training.models.torchvision import as_given
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.tasks.base import make_task, target_spec
from hpc_train.training.train_state import TrainState, build, context
from tests.datasets.sources import stand_in_datasets
from tests.parallelism import task_data
from tests.parallelism.cases import STEPS
from tests.parallelism.task_cases import BY_TITLE, MICRO_BATCH_SIZE, SEED, Cell, TaskCase
from tests.parallelism.training import whole
from tests.rank_context import as_rank
from tests.tasks.detectors import tiny

_CPU = torch.device("cpu")
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass
class Trained:
    """What training leaves: a rank's losses, and whole parameters and buffers by name."""

    losses: Tensor
    weights: Mapping[str, Tensor]


def train(rank: int, ranks: int, title: str, strategy: str, precision: str, root: Path) -> Trained:
    """Train a case on this rank. Collective. Raises BadFileError where the ranks refuse to."""
    config, source = _opened(BY_TITLE[title], root, strategy, precision)
    degrees = find_degrees(config.parallel, ranks, ranks)
    assert isinstance(degrees, Degrees), degrees
    state = _build(config, source, degrees, rank)
    task, chosen = make_task(config, source.info), choose_precision(config.precision, _CPU)
    forward = TrainingForward.of(config, source.info, state, task, chosen, _CPU)
    guard = Guard(config.optimization, state.model, norm_counts=False)
    place = (degrees.data_rank(rank), degrees.data_ranks)
    losses = []
    state.wrapped.train()
    with training_batches(source, config, Position(0), STEPS, *place, _CPU, None, target_spec(task)) as given:
        for step, own in given:
            losses.append(train_step(state, step, own, forward, guard, None).loss)
    held = NamedTensors.of(state.model).tensors
    return Trained(torch.stack(losses), whole(state.strategy, held, held))


def _build(config: Experiment, source: DataSource, degrees: Degrees, rank: int) -> TrainState:
    batches = BatchArithmetic.of(config.optimization, len(source.train), degrees.data_ranks)
    told = as_rank(config, rank, degrees, choose_precision(config.precision, _CPU))
    return build(config, source.info, batches, context(told))


def _opened(case: TaskCase, root: Path, strategy: str, precision: str) -> tuple[Experiment, DataSource]:
    os.environ["HPC_TRAIN_CACHE"] = str(root / "cache")
    if case.data["name"] == "huggingface":
        # Compared with the library in tests/datasets/sources/test_huggingface.py.
        sys.modules["datasets"] = stand_in_datasets
    config = case.experiment(root, strategy, precision)
    return config, build_source(config.data)


def evaluated(rank: int, ranks: int, title: str, precision: str, root: Path) -> Any:
    """Return the metrics and the sums of an untrained model over the validation data. Collective."""
    config, source = _opened(BY_TITLE[title], root, "ddp", precision)
    task: Any = make_task(config, source.info)
    chosen = choose_precision(precision, _CPU)
    seed_build(SEED)
    model = build_model(config.model, source.info).to(chosen.param_dtype).eval()
    to_input = make_to_input(config, source.info, _CPU, chosen)

    def sums(batch: Batch) -> dict[str, Any]:
        moved = to_input(batch)
        return task.sums(task.forward(model, moved), moved)

    assert source.val is not None
    batches = evaluation_batches(source.val, config, rank, ranks, _CPU, None, target_spec(task))
    with torch.no_grad():
        count = evaluation_batch_count(source.val, MICRO_BATCH_SIZE)
        found = evaluate(batches, count, sums, _CPU, lambda place: None, lambda: False)
    assert found is not None
    return task.metrics(found), {name: _as_lists(value) for name, value in found.items()}


def _as_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [each.tolist() for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


def plain(rank: int, ranks: int, title: str, precision: str, root: Path) -> Trained:
    """Train by a bare loop that reads the files itself: of hpc-train it has the order of the samples and
    the seeds.
    """
    case, dtype = BY_TITLE[title], _DTYPES[precision]
    samples = task_data.samples(case, root)
    model = _plain_model(case, root).to(dtype).train()
    if "freeze" in case.model:
        model.backbone.requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.parameters(), case.lr, momentum=0.9)
    sampler = MicroBatchSampler(
        len(samples),
        global_batch_size=MICRO_BATCH_SIZE * case.micro_batches,
        micro_batch_size=MICRO_BATCH_SIZE,
        seed=SEED,
        position=Position(0),
        total_steps=STEPS,
    )
    losses = torch.zeros(STEPS, dtype=torch.float64)
    slots = list(sampler)
    weights = torch.zeros(STEPS, dtype=torch.float64)
    for slot in slots:
        weights[slot.step] += sum(_weight(case, samples[index][1]) for index in slot.indices.tolist())
    for slot in slots:
        seed_forward(SEED, slot.step, slot.number, _CPU)
        own = [samples[index] for index in slot.indices.tolist()]
        inputs = [each.to(dtype) if each.is_floating_point() else each for each, _ in own]
        share = sum(_weight(case, target) for _, target in own) / weights[slot.step]
        loss = _plain_loss(case, model, inputs, [target for _, target in own]) * share
        loss.backward()  # type: ignore[no-untyped-call]
        losses[slot.step] += loss.detach()
        if slot.number == case.micro_batches - 1:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, dict(model.state_dict()))


def _weight(case: TaskCase, target: Any) -> float:
    """Return the labelled pixels of a mask; other samples weigh the same."""
    return float((target != 255).sum()) if case.task == "segmentation" else 1.0


def _plain_model(case: TaskCase, root: Path) -> nn.Module:
    """Return the library's own model with the weights that a run begins with."""
    config, source = _opened(case, root, "ddp", "fp64")
    seed_build(SEED)
    begun = build_model(config.model, source.info).state_dict()
    model = _library_model(case, config, source.info.num_classes)
    model.load_state_dict(begun)
    return model


def _library_model(case: TaskCase, config: Experiment, num_classes: int) -> nn.Module:
    provider, _, rest = config.model.name.partition("/")
    if provider == "timm":
        made: nn.Module = timm.create_model(rest, num_classes=num_classes, in_chans=3, **config.model.args)
        return made
    if provider == "hf":
        import transformers

        settings = transformers.AutoConfig.from_pretrained(rest, num_labels=num_classes)
        is_text = case.task == "causal_lm"
        kind = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageClassification
        return kind.from_config(settings)  # type: ignore[no-any-return]
    if provider == "tests.tasks.detectors:tiny":
        return tiny(num_classes)
    if case.task == "detection":
        size = num_classes + 1
        detector: Any = torchvision.models.get_model(
            rest, weights=None, weights_backbone=None, num_classes=size, **config.model.args
        )
        detector.compute_loss = _OneByOne(detector.compute_loss)
        return as_given(detector)
    if case.task == "segmentation":
        return torchvision.models.get_model(  # type: ignore[no-any-return]
            rest, weights=None, weights_backbone=None, num_classes=num_classes
        )
    return build_model(config.model, build_source(config.data).info)  # gpt; see tests/models/test_gpt.py


@dataclass(frozen=True)
class _OneByOne:
    """SSD's losses as the mean of those of each image, not of the matched anchors of a micro-batch."""

    compute_loss: Any

    def __call__(self, targets: Any, outputs: Any, anchors: Any, matches: Any) -> Any:
        total: dict[str, Tensor] = {}
        for i, target in enumerate(targets):
            own = {key: value[i][None] for key, value in outputs.items()}
            losses = self.compute_loss([target], own, [anchors[i]], [matches[i]])
            total = {key: total.get(key, 0) + value / len(targets) for key, value in losses.items()}
        return total


def _plain_loss(case: TaskCase, model: nn.Module, inputs: list[Tensor], targets: list[Any]) -> Tensor:
    if case.task == "detection":
        boxes = [{**each, "boxes": each["boxes"].to(inputs[0].dtype)} for each in targets]
        losses: dict[str, Tensor] = model(inputs, boxes)
        return torch.stack(list(losses.values())).sum()
    outputs = model(torch.stack(inputs))
    outputs = getattr(outputs, "logits", outputs)
    if case.task == "segmentation":
        masks = torch.stack(targets)
        total = functional.cross_entropy(outputs["out"], masks, ignore_index=255, reduction="sum")
        return total / (masks != 255).sum().clamp(min=1)
    if case.task == "causal_lm":
        return functional.cross_entropy(outputs.flatten(0, 1), torch.cat(targets))
    if case.task == "regression":
        return functional.mse_loss(outputs[:, 0], torch.tensor(targets, dtype=outputs.dtype))
    if isinstance(targets[0], Tensor):
        return functional.binary_cross_entropy_with_logits(outputs, torch.stack(targets).to(outputs.dtype))
    return functional.cross_entropy(outputs, torch.tensor(targets))


@dataclass(frozen=True)
class Difference:
    """The largest difference of losses, and of weights with buffers: relative where a number exceeds 1."""

    losses: float
    weights: float
    limit: float

    @property
    def is_within(self) -> bool:
        return self.losses <= self.limit and self.weights <= self.limit


#: Precision → most that losses, and weights, may differ.
LIMITS = {"fp64": 1e-9, "fp32": 1e-5}


def difference(cell: Cell, ranks: list[Trained], expected: Trained) -> Difference:
    """Compare what the ranks of a cell have with the bare loop's."""
    losses = torch.stack([each.losses for each in ranks]).sum(0)
    weights = ranks[0].weights
    # A tied weight has one name in a checkpoint.
    assert weights.keys() <= expected.weights.keys()
    apart = max(_apart(value, expected.weights[name]) for name, value in weights.items())
    return Difference(_apart(losses, expected.losses), apart, LIMITS[cell.precision])


def _apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    expected = other.double()
    # amax keeps NaN.
    return float(((one.double() - expected).abs() / expected.abs().clamp(min=1)).amax())
