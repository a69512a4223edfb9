"""Detection against plain PyTorch, and its metrics against pycocotools."""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.batches import evaluation_batch_count, evaluation_batches, training_batches
from hpc_train.datasets.building import build_source
from hpc_train.datasets.sampler import MicroBatchSampler, Position
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.distributed.precision import choose_precision
from hpc_train.distributed.seeds import seed_build, seed_forward
from hpc_train.errors import BadFileError
from hpc_train.tasks.base import make_task, target_spec
from hpc_train.tasks.detection import Detection, average_precision
from hpc_train.topology.batch_arithmetic import BatchArithmetic
from hpc_train.topology.degrees import Degrees, find_degrees
from hpc_train.training.evaluation import evaluate
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.train_state import build, context
from tests.datasets.coco import read, write_coco
from tests.parallelism.training import whole
from tests.rank_context import as_rank
from tests.ranks import run_ranks
from tests.tasks.detectors import tiny

CPU = torch.device("cpu")
STEPS = 20
MEAN, STD = (0.4, 0.45, 0.5), (0.2, 0.25, 0.3)
_needs_pycocotools = pytest.mark.skipif(
    importlib.util.find_spec("pycocotools") is None, reason="needs pycocotools: the extra 'detection'"
)


def experiment(root: Path, strategy: str = "ddp") -> Experiment:
    return Experiment.model_validate(
        {
            "name": "x",
            "task": "detection",
            "model": {"name": "tests.tasks.detectors:tiny"},
            "data": {"name": "coco", "root": str(root), "normalize": {"mean": list(MEAN), "std": list(STD)}},
            "optimization": {
                "steps": STEPS,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
                "clip_grad_norm": 1.0,
            },
            "precision": "fp64",
            "parallel": {"strategy": strategy},
        }
    )


def train(rank: int, ranks: int, root: Path, strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Train as the loop does; return the rank's losses and whole weights."""
    config = experiment(root, strategy)
    source = build_source(config.data)
    degrees = find_degrees(config.parallel, ranks, ranks)
    assert isinstance(degrees, Degrees)
    precision, task = choose_precision("fp64", CPU), make_task(config, source.info)
    batches = BatchArithmetic.of(config.optimization, len(source.train), ranks)
    state = build(config, source.info, batches, context(as_rank(config, rank, degrees, precision)))
    to_input = make_to_input(config, source.info, CPU, precision)
    forward = TrainingForward.of(config, state, task, precision, CPU, to_input)
    guard = Guard(config.optimization, state.model, norm_counts=False)
    spec, losses = target_spec(task), []
    state.wrapped.train()
    with training_batches(source, config, Position(0), STEPS, rank, ranks, CPU, None, spec) as given:
        for step, own in given:
            losses.append(train_step(state, step, own, forward, guard, 1.0).loss)
    state.strategy.share_buffers(all_persistent=True)
    held = dict(state.strategy.model.named_parameters()) | dict(state.strategy.model.named_buffers())
    return torch.stack(losses), whole(state.strategy, held, held)


def evaluated(rank: int, ranks: int, root: Path, weights: dict[str, Tensor]) -> Any:
    """Return the metrics and the detections of a model with these weights."""
    config = experiment(root)
    source = build_source(config.data)
    task, model = make_task(config, source.info), tiny(2).double().eval()
    model.load_state_dict(weights)
    to_input = make_to_input(config, source.info, CPU, choose_precision("fp64", CPU))

    def sums(batch: Batch) -> dict[str, Any]:
        moved = to_input(batch)
        return task.sums(task.forward(model, moved), moved)

    assert source.val is not None
    batches = evaluation_batches(source.val, config, rank, ranks, CPU, None, target_spec(task))
    count = evaluation_batch_count(source.val, 2)
    with torch.no_grad():
        found = evaluate(batches, count, sums, CPU, lambda place: None, lambda: False)
    assert found is not None
    return task.metrics(found), [each.tolist() for each in found["detections"]]


def plain(root: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Train by a bare loop that reads the JSON and the files itself."""
    document = read(root)
    samples = [sample(root, document, image) for image in document["images"]]
    seed_build(0)
    model = tiny(2).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = MicroBatchSampler(
        len(samples),
        global_batch_size=8,
        micro_batch_size=2,
        seed=0,
        position=Position(0),
        total_steps=STEPS,
        rank=0,
        world_size=1,
    )
    slots, losses = iter(sampler), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number in range(4):
            own = [samples[index] for index in next(slots).indices.tolist()]
            seed_forward(0, step, number, CPU)
            found = model([image for image, _ in own], [target for _, target in own])
            loss: Any = sum(found.values()) / 4
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses), model.state_dict()


def sample(root: Path, document: dict[str, Any], image: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    pixels = torch.from_numpy(np.array(Image.open(root / "train" / image["file_name"]))).permute(2, 0, 1)
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (MEAN, STD))
    values = (pixels.double() / 255 - mean) / std
    own = [each for each in document["annotations"] if each["image_id"] == image["id"]]
    boxes = torch.tensor([each["bbox"] for each in own], dtype=torch.float64).view(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([{3: 1, 7: 2}[each["category_id"]] for each in own], dtype=torch.int64)
    return values, {"boxes": boxes, "labels": labels}


@pytest.mark.slow
@_needs_pycocotools
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_20_steps_equal_plain_pytorch(ranks: int, strategy: str, tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco", train=12, val=11)
    losses, weights = plain(root)
    found = run_ranks(ranks, train, root, strategy, folder=tmp_path)
    torch.testing.assert_close(sum(each for each, _ in found), losses, rtol=1e-9, atol=1e-11)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@_needs_pycocotools
def test_an_evaluation_is_the_same_on_one_to_three_ranks(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco", train=12, val=11)
    _, weights = plain(root)
    alone, *others = (
        each for ranks in (1, 2, 3) for each in run_ranks(ranks, evaluated, root, weights, folder=tmp_path)
    )
    metrics, detections = alone
    assert others == [alone] * 5
    assert len(detections) == 11 and 0 < metrics["map"] <= metrics["map50"]


def info(num_classes: int = 2) -> DataInfo:
    return DataInfo(num_classes, 3, MEAN, STD)


def random_boxes(generator: torch.Generator, count: int) -> Tensor:
    corners = torch.rand(count, 2, generator=generator) * 60
    return torch.cat([corners, corners + 4 + 30 * torch.rand(count, 2, generator=generator)], dim=1)


def predictions(num_samples: int = 9) -> tuple[list[Tensor], list[Tensor]]:
    """Return boxes that are there, some of crowds, and detections near some of them."""
    generator = torch.Generator().manual_seed(3)
    found, there = [], []
    for sample in range(num_samples):
        count = sample % 4
        boxes, labels = random_boxes(generator, count), torch.randint(1, 4, (count,), generator=generator)
        crowds = (torch.rand(count, generator=generator) < 0.2).float()
        there.append(torch.cat([boxes, labels[:, None], crowds[:, None]], dim=1))
        near = torch.cat([boxes + 2 * torch.randn(count, 4, generator=generator), random_boxes(generator, 2)])
        guessed = torch.cat([labels, torch.randint(1, 4, (2,), generator=generator)])
        scores = torch.rand(count + 2, generator=generator)
        found.append(torch.cat([near, guessed[:, None], scores[:, None]], dim=1))
    return found, there


@_needs_pycocotools
def test_average_precision_is_that_of_pycocotools() -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found, there = predictions()
    truth = COCO()
    truth.dataset = {"images": [], "annotations": [], "categories": [{"id": each} for each in (1, 2, 3)]}
    results = []
    for sample, (detected, boxes) in enumerate(zip(found, there, strict=True)):
        truth.dataset["images"].append({"id": 5 + sample})
        for left, top, right, bottom, label, crowd in boxes.double().tolist():
            box = [left, top, right - left, bottom - top]
            truth.dataset["annotations"].append({
                "id": len(truth.dataset["annotations"]) + 1, "image_id": 5 + sample, "bbox": box,
                "category_id": int(label), "iscrowd": int(crowd), "area": box[2] * box[3],
            })  # fmt: skip
        for left, top, right, bottom, label, score in detected.double().tolist():
            box = [left, top, right - left, bottom - top]
            result = {"image_id": 5 + sample, "category_id": int(label), "bbox": box, "score": score}
            results.append(result)
    with redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert sum(float(boxes[:, 5].sum()) for boxes in there) > 0, "crowds are among them"
    assert 0.05 < evaluation.stats[0] < evaluation.stats[1] < 0.9
    assert average_precision(found, there, 3) == pytest.approx(tuple(evaluation.stats[:2]), rel=1e-12)


@_needs_pycocotools
def test_average_precision_without_boxes_or_detections_is_zero() -> None:
    found, there = predictions()
    nothing = [torch.zeros(0, 6) for _ in found]
    assert average_precision(nothing, there, 3) == (0.0, 0.0)
    assert average_precision(found, nothing, 3) == (0.0, 0.0)
    assert average_precision(there, there, 3)[1] > 0.9, "the boxes themselves, with scores of 0 and 1"


class Echo(torch.nn.Module):
    """Returns the number of boxes to learn of each sample as a loss, or one detection per image."""

    def forward(self, images: Tensor, targets: Any = None) -> Any:
        if self.training:
            return {"a": sum(each["boxes"].sum() for each in targets), "b": targets[0]["labels"].sum()}
        box = {"boxes": torch.ones(1, 4), "labels": torch.tensor([2]), "scores": torch.tensor([0.5])}
        return [box for _ in images]


@_needs_pycocotools
def test_crowds_are_evaluated_and_not_learnt() -> None:
    task = Detection(experiment(Path("x")), info())
    targets = {
        "boxes": [torch.ones(2, 4), torch.zeros(0, 4)],
        "labels": [torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64)],
        "iscrowd": [torch.tensor([0, 1]), torch.zeros(0, dtype=torch.int64)],
    }
    batch = Batch(0, 0, 1.0, torch.zeros(2, 3, 4, 4), targets, torch.tensor([True, False]))
    assert float(task.loss(task.forward(Echo(), batch), batch)) == 4 + 1
    sums = task.sums(task.forward(Echo().eval(), batch), batch)
    assert sums["count"] == 1
    assert sums["detections"][0].tolist() == [[1, 1, 1, 1, 2, 0.5]]
    assert [each.tolist() for each in sums["boxes"]] == [[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 2, 1]], []]


@_needs_pycocotools
def test_predictions_are_boxes_of_the_stored_image(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco")
    config = experiment(root)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"image_size": 20, "eval_size": (45, 27)})}
    )
    source = build_source(config.data)
    task = Detection(config, source.info)
    assert source.val is not None
    found = []
    for batch in evaluation_batches(source.val, config, 0, 1, CPU, None, task.target_spec):
        targets = zip(batch.targets["boxes"], batch.targets["labels"], strict=True)
        outputs = [
            {"boxes": boxes, "labels": labels, "scores": torch.arange(len(boxes)) / 4}
            for boxes, labels in targets
        ]
        rows = task.predictions(outputs, batch)
        found += [row["boxes"] for row, is_valid in zip(rows, batch.valid, strict=True) if is_valid]
    expected: list[list[Any]] = [[] for _ in range(5)]
    for each in read(root, "val")["annotations"]:
        left, top, width, height = each["bbox"]
        scored = {"class": {3: "dark", 7: "bright"}[each["category_id"]]}
        box = pytest.approx([left, top, left + width, top + height], abs=1e-4)
        expected[each["image_id"] // 10].append(scored | {"box": box})
    for boxes in expected:
        for place, box in enumerate(boxes):
            box["score"] = place / 4
    assert found == [boxes[::-1] for boxes in expected]


def test_without_pycocotools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.tasks.detection.find_spec", lambda name: None)
    with pytest.raises(BadFileError, match=r"pycocotools, which is not .* 'hpc-train\[detection\]'"):
        Detection(experiment(Path("x")), info())


@_needs_pycocotools
def test_a_label_beyond_the_classes_is_refused_at_its_sample(tmp_path: Path) -> None:
    config = experiment(write_coco(tmp_path / "coco"))
    config.model.args["num_classes"] = 1
    source = build_source(config.data)
    spec = target_spec(make_task(config, source.info))
    said = r"sample \d \(.*\.png\) has the target 'labels' .*, and task detection needs a class number"
    with (
        training_batches(source, config, Position(0), 2, 0, 1, CPU, None, spec) as batches,
        pytest.raises(BadFileError, match=said),
    ):
        list(batches)


@_needs_pycocotools
def test_boxes_follow_their_resized_image(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco")
    config = experiment(root)
    data = config.data.model_copy(update={"image_size": (16, 40)})
    config = config.model_copy(update={"data": data})
    source = build_source(config.data)
    assert source.val is not None
    spec = target_spec(make_task(config, source.info))
    first = next(iter(evaluation_batches(source.val, config, 0, 1, CPU, None, spec)))
    assert first.inputs.shape == (2, 3, 16, 40)
    left, top, width, height = read(root, "val")["annotations"][-1]["bbox"]
    assert first.targets["boxes"][1].tolist() == [
        [left / 2, top / 2, (left + width) / 2, (top + height) / 2]
    ], "half of 32 pixels, at the top left of 16 x 40"
