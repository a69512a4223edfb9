"""Metrics of each task are torchmetrics' on the same predictions, merged from batches of unequal size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.evaluation import without_dimensions
from hpc_train.training.tasks.base import make_task

pytestmark = [
    pytest.mark.slow,  # the import takes seconds
    pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="needs torchmetrics"),
]

COUNT, CLASSES, IGNORED = 41, 7, 255
PARTS = (slice(0, 17), slice(17, 30), slice(30, COUNT))


def info(num_classes: int = CLASSES, **keys: Any) -> DataInfo:
    return DataInfo(num_classes, 3, (0.5,) * 3, (0.5,) * 3, **keys)


def metrics(name: str, of: DataInfo, outputs: Sequence[Any] | Tensor, targets: Any) -> dict[str, float]:
    """Return the metrics of these outputs, in three batches; ``targets``: a tensor or a dict of lists."""
    experiment = Experiment.model_validate({
        "name": "x", "task": name, "model": {"name": "own:model"}, "data": {"name": "own:data"},
        "optimization": {
            "steps": 1, "global_batch_size": 4, "micro_batch_size": 4,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
    })  # fmt: skip
    task = make_task(experiment, of)
    merged: dict[str, Any] = {}
    for part in PARTS:
        is_dict = isinstance(targets, dict)
        own = {key: each[part] for key, each in targets.items()} if is_dict else targets[part]
        count = len(outputs[part])
        found = task.sums(outputs[part], Batch(0, 0, 1.0, None, own, torch.ones(count, dtype=torch.bool)))
        merged = {key: merged[key] + value if merged else value for key, value in found.items()}
    return task.metrics({key: without_dimensions(value) for key, value in merged.items()})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape: int, high: int = CLASSES) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def one_class() -> tuple[dict[str, float], dict[str, Any]]:
    from torchmetrics.functional import classification

    logits, targets = drawn(COUNT, CLASSES), classes(COUNT)
    accuracy: Callable[..., Tensor] = classification.multiclass_accuracy
    theirs = {
        "accuracy": accuracy(logits, targets, CLASSES, average="micro"),
        "accuracy_top5": accuracy(logits, targets, CLASSES, average="micro", top_k=5),
    }
    return metrics("classification", info(), logits, targets), theirs


def several_labels() -> tuple[dict[str, float], dict[str, Any]]:
    from torchmetrics.functional import classification

    labels = classes(COUNT, CLASSES, high=2)
    logits = drawn(COUNT, CLASSES) + 4 * labels - 2
    chances = logits.sigmoid()
    theirs = {
        "accuracy": classification.multilabel_exact_match(chances, labels, CLASSES),
        "f1_micro": classification.multilabel_f1_score(chances, labels, CLASSES, average="micro"),
        "f1_macro": classification.multilabel_f1_score(chances, labels, CLASSES, average="macro"),
        "map_multilabel": classification.multilabel_average_precision(chances, labels, CLASSES),
    }
    return metrics("classification", info(target_shape=(CLASSES,)), logits, labels), theirs


def numbers() -> tuple[dict[str, float], dict[str, Any]]:
    from torchmetrics.functional import regression

    targets = 2 * drawn(COUNT, 3, seed=2) + 1
    outputs = targets + drawn(COUNT, 3)
    theirs = {
        "mae": regression.mean_absolute_error(outputs, targets),
        "rmse": regression.mean_squared_error(outputs, targets, squared=False),
        "r2": regression.r2_score(outputs, targets),
    }
    return metrics("regression", info(3, target_shape=(3,)), outputs, targets), theirs


def pixels() -> tuple[dict[str, float], dict[str, Any]]:
    from torchmetrics.functional import classification

    logits, masks = drawn(COUNT, CLASSES, 6, 5), classes(COUNT, 6, 5)
    masks[:, 0] = IGNORED
    keys = {"num_classes": CLASSES, "ignore_index": IGNORED}
    ious = classification.multiclass_jaccard_index(logits, masks, average="none", **keys)
    theirs = {f"iou_{number}": iou for number, iou in enumerate(ious)}
    theirs["miou"] = classification.multiclass_jaccard_index(logits, masks, average="macro", **keys)
    theirs["accuracy"] = classification.multiclass_accuracy(logits, masks, average="micro", **keys)
    return metrics("segmentation", info(ignore_index=IGNORED), logits, masks), theirs


def next_tokens() -> tuple[dict[str, float], dict[str, Any]]:
    from torchmetrics.functional import classification, text

    logits, targets = drawn(COUNT, 9, CLASSES), classes(COUNT, 9)
    theirs = {
        "perplexity": text.perplexity(logits, targets),
        "accuracy": classification.multiclass_accuracy(
            logits.flatten(0, 1), targets.flatten(), CLASSES, average="micro"
        ),
    }
    return metrics("causal_lm", DataInfo(CLASSES, 0, (), (), sequence_length=9), logits, targets), theirs


def boxes() -> tuple[dict[str, float], dict[str, Any]]:
    pytest.importorskip("pycocotools", reason="needs pycocotools: the extra 'detection'")
    from torchmetrics.detection import MeanAveragePrecision

    there = [random_boxes(sample % 4, sample) for sample in range(COUNT)]
    found = [
        {**each, "boxes": each["boxes"] + drawn(len(each["boxes"]), 4, seed=sample).float()}
        for sample, each in enumerate(there)
    ]
    for sample, each in enumerate(found):
        each["scores"] = torch.rand(len(each["boxes"]), generator=torch.Generator().manual_seed(sample))
    theirs = MeanAveragePrecision()
    theirs.update(found, there)
    crowds = [torch.zeros(len(each["labels"]), dtype=torch.int64) for each in there]
    targets = {key: [each[key] for each in there] for key in ("boxes", "labels")} | {"iscrowd": crowds}
    expected = theirs.compute()
    ours = metrics("detection", info(3), found, targets)
    return ours, {"map": expected["map"], "map50": expected["map_50"]}


def random_boxes(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    corners = torch.rand(count, 2, generator=generator) * 60
    sides = 4 + 30 * torch.rand(count, 2, generator=generator)
    labels = torch.randint(1, 4, (count,), generator=generator)
    return {"boxes": torch.cat([corners, corners + sides], dim=1), "labels": labels}


@pytest.mark.parametrize(
    "both", [one_class, several_labels, numbers, pixels, next_tokens, boxes], ids=lambda both: both.__name__
)
def test_metrics_are_those_of_torchmetrics(
    both: Callable[[], tuple[dict[str, float], dict[str, Any]]],
) -> None:
    ours, theirs = both()
    assert ours.keys() - theirs.keys() <= {"loss"}
    for name, value in theirs.items():
        assert float(value) > 0, name
        # torchmetrics computes in float32.
        assert ours[name] == pytest.approx(float(value), rel=2e-6), name
