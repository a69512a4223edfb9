"""Detection against plain PyTorch, and its metrics against pycocotools."""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.base import make_task, target_spec
from hpc_train.training.tasks.detection import Detection, average_precision
from tests.datasets.coco import read, write_coco
from tests.experiments import tiny_experiment

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.45, 0.5), (0.2, 0.25, 0.3)
_needs_pycocotools = pytest.mark.skipif(
    importlib.util.find_spec("pycocotools") is None, reason="needs pycocotools: the extra 'detection'"
)


def experiment(root: Path, strategy: str = "ddp") -> Experiment:
    return tiny_experiment(
        {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        },
        task="detection",
        model={"name": "tests.tasks.detectors:tiny"},
        data={"name": "coco", "root": str(root), "normalize": {"mean": list(MEAN), "std": list(STD)}},
        precision="fp64",
        parallel={"strategy": strategy},
    )


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
    monkeypatch.setattr("hpc_train.training.tasks.detection.find_spec", lambda name: None)
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
