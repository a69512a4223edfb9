"""A plug-in's task with dict batches and dense targets, and one with boxes, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.experiment.config.training_sections import OptimizationConfig, ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.batches import evaluation_batch_count, evaluation_batches
from hpc_train.training.datasets.types import Batch, TargetSpec
from hpc_train.training.evaluation import evaluate
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from tests.datasets.samples import experiment
from tests.experiments import tiny_experiment
from tests.forwards import make_train_state, training_forward
from tests.parallelism.training import whole
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS = 3
MICRO_BATCHES = 4
CLASSES = 3
SIDE = 6
MAX_NORM = 0.1


class Dense:
    """Segmentation: logits (B, K, H, W) against class numbers (B, H, W) int64, beside a second target."""

    def __init__(self, *, has_several_inputs: bool) -> None:
        self.has_several_inputs = has_several_inputs

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        logits, brightness = outputs
        assert batch.targets["mask"].dtype == torch.int64
        masks = functional.cross_entropy(logits, batch.targets["mask"], ignore_index=255)
        return masks + functional.mse_loss(brightness, batch.targets["brightness"])

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        hits = (outputs[0].argmax(1) == batch.targets["mask"]) & batch.valid[:, None, None]
        return {"count": batch.valid.sum().double(), "correct": hits.sum().double()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["count"]}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Conv2d(4, CLASSES, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits(hidden), hidden.mean((1, 2, 3))


class Several(nn.Sequential):
    """Takes a dict of an image and a number per sample, which is added to each pixel."""

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs["image"] + inputs["offset"][:, None, None, None])


def make_model(*, has_several_inputs: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [*(nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), nn.Tanh()) for c in (2, 4, 4)), Last()]
    return (Several if has_several_inputs else nn.Sequential)(*layers)


def make_batch(step: int, number: int, *, has_several_inputs: bool) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + number)
    images = torch.randn(2, 2, SIDE, SIDE, generator=generator, dtype=torch.float64)
    masks = torch.randint(CLASSES, (2, SIDE, SIDE), generator=generator)
    masks[0, 0] = 255
    targets = {"mask": masks, "brightness": torch.rand(2, generator=generator, dtype=torch.float64)}
    offsets = torch.rand(2, generator=generator, dtype=torch.float64)
    inputs: Any = {"image": images, "offset": offsets} if has_several_inputs else images
    valid = torch.ones(2, dtype=torch.bool)
    return Batch(step, number, 1 / MICRO_BATCHES, inputs, targets, valid)


def optimization_config() -> OptimizationConfig:
    adamw = {"name": "adamw", "lr": 0.01}
    return tiny_experiment({"steps": STEPS, "optimizer": adamw, "clip_grad_norm": MAX_NORM}).optimization


def train(rank: int, world_size: int, name: str, has_several_inputs: bool) -> dict[str, Any]:
    """Train as the loop does; return losses, whole weights, and the ranks' inputs that were normalised."""
    degrees = {
        "ddp": Degrees(replicate=world_size),
        "fsdp": Degrees(shard=world_size),
        "pipeline": Degrees(pipeline=world_size),
    }[name]
    strategy = make_strategy(name, rank, degrees, parallel=ParallelConfig(strategy=name))
    model = make_model(has_several_inputs=has_several_inputs)
    config, normalised = optimization_config(), []
    state = make_train_state(strategy, model, list(model.children())[:3], config.optimizer, 8)
    state.wrapped.train()

    def to_input(batch: Batch) -> Batch:
        normalised.append((batch.step, batch.number))
        return batch.to(CPU)

    task = Dense(has_several_inputs=has_several_inputs)
    forward = training_forward(task, to_device=to_input)
    guard = Guard(config, model, norm_counts=True)
    own = range(degrees.data_rank(rank), MICRO_BATCHES, degrees.data_ranks)
    losses = []
    for step in range(STEPS):
        batches = [make_batch(step, number, has_several_inputs=has_several_inputs) for number in own]
        losses.append(train_step(state, step, batches, forward, guard, MAX_NORM).loss)
    held = dict(strategy.model.named_parameters())
    return {"losses": torch.stack(losses), "weights": whole(strategy, held, held), "normalised": normalised}


def plain_training(has_several_inputs: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(has_several_inputs=has_several_inputs).double()
    task = Dense(has_several_inputs=has_several_inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number in range(MICRO_BATCHES):
            batch = make_batch(step, number, has_several_inputs=has_several_inputs)
            loss = task.loss(model(batch.inputs), batch) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return torch.stack(losses), dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "name", "has_several_inputs"),
    [(1, "ddp", True), (2, "ddp", True), (2, "fsdp", True), (2, "pipeline", False)],
)
def test_dict_batches_with_dense_targets_equal_plain_pytorch(
    world_size: int, name: str, has_several_inputs: bool, tmp_path: Path
) -> None:
    ranks = run_ranks(world_size, train, name, has_several_inputs, folder=tmp_path)
    losses, weights = plain_training(has_several_inputs)
    torch.testing.assert_close(sum(rank["losses"] for rank in ranks), losses, rtol=1e-9, atol=1e-12)
    for key, value in weights.items():
        torch.testing.assert_close(ranks[0]["weights"][key], value.detach(), rtol=1e-9, atol=1e-12)
    if name == "pipeline":  # both see the first one once, to know the shapes that pass
        assert ranks[1]["normalised"] == [(0, 0)], "the last stage needs targets alone"
        assert len(ranks[0]["normalised"]) == 1 + STEPS * MICRO_BATCHES


@pytest.mark.slow
def test_several_inputs_are_refused_by_stages(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="stages of a model take one tensor of inputs"):
        run_ranks(2, train, "pipeline", True, folder=tmp_path)


SPEC = {"boxes": TargetSpec("corners of boxes", kind="float", shape=(None, 4), is_ragged=True)}


class Boxes:
    """Seven images with as many boxes as the sample's number."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        pixels = torch.full((3, 4, 4), index, dtype=torch.uint8)
        return pixels, {"boxes": torch.full((index, 4), float(index))}


def count_boxes(rank: int, world_size: int) -> dict[str, float] | None:
    batches = evaluation_batches(Boxes(), experiment(micro_batch_size=2), rank, world_size, CPU, None, SPEC)

    def sums(batch: Batch) -> dict[str, Tensor]:
        areas = torch.stack([boxes.sum() for boxes in batch.targets["boxes"]])
        found = {"count": batch.valid, "boxes": torch.where(batch.valid, areas, 0)}
        return {name: value.sum(dtype=torch.float64) for name, value in found.items()}

    return evaluate(batches, evaluation_batch_count(Boxes(), 2), sums, CPU, lambda place: None, lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_of_boxes_counts_each_once(world_size: int, tmp_path: Path) -> None:
    expected = {"count": 7.0, "boxes": float(sum(4 * index * index for index in range(7)))}
    assert run_ranks(world_size, count_boxes, folder=tmp_path) == [expected] * world_size
