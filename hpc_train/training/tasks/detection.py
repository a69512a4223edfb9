"""``task: detection``: boxes and classes of objects, with a model that computes its own losses.

Its metric is COCO's average precision, by pycocotools (optional extra ``detection``).

Legend: B samples, N of the validation data, C classes, K boxes of a sample, D detections in it.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hpc_train.errors import BadFileError, counted
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.joint import fitted_back
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.training.tasks import drawing
from hpc_train.training.tasks.base import at_least_float32

#: Drawn detections (assumed): the minimum score and the maximum number.
_SHOWN_SCORE, _SHOWN = 0.3, 50


class Detection:
    """For detectors with the interface of torchvision's detectors.

    In training ``model(images, targets)`` returns a dict of losses, whose sum is minimized; in evaluation
    ``model(images)`` returns for each image a dict with ``boxes`` (D, 4), ``labels`` (D,) and ``scores``
    (D,). Labels are 1…C.
    """

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        if find_spec("pycocotools") is None:
            raise BadFileError(
                "task: detection computes its metrics by pycocotools, which is not installed; run "
                "pip install 'hpc-train[detection]'"
            )
        self._num_classes = experiment.model.args.get("num_classes", info.num_classes)
        self._class_names = info.class_names
        self._canvas = experiment.data.eval_height_and_width
        per_box = partial(TargetSpec, kind="integer", shape=(None,), is_ragged=True, geometry="per box")
        self.target_spec = {
            "boxes": TargetSpec(
                "the corners of boxes", "float", (None, 4), minimum=0, is_ragged=True, geometry="boxes"
            ),
            "labels": per_box("a class number per box", minimum=1, maximum=self._num_classes),
            "iscrowd": per_box("1 for each box of a crowd, else 0", minimum=0, maximum=1),
        }

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the losses by name; in evaluation the detections of each image."""
        return model(batch.inputs, _training_targets(batch)) if model.training else model(batch.inputs)

    def loss(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum of the model's losses, each a mean over the images."""
        return torch.stack([at_least_float32(loss) for loss in outputs.values()]).sum()

    def sums(self, outputs: list[dict[str, Tensor]], batch: Batch) -> dict[str, Any]:
        """Return ``count``, and the records ``detections`` (D, 6) and ``boxes`` (K, 6).

        Columns: left, top, right, bottom, label, and score (``detections``) or 1 for a crowd (``boxes``).
        """
        targets = zip(*(batch.targets[name] for name in self.target_spec), strict=True)
        return {
            "count": batch.valid.sum(dtype=torch.float64),
            "detections": [_rows(item["boxes"], item["labels"], item["scores"]) for item in outputs],
            "boxes": [_rows(*target) for target in targets],
        }

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return COCO's average precision ``map`` (IoU 0.5 to 0.95) and ``map50`` (IoU 0.5)."""
        precision, at_50 = average_precision(sums["detections"], sums["boxes"], self._num_classes)
        return {"map": precision, "map50": at_50}

    def predictions(self, outputs: list[dict[str, Tensor]], batch: Batch) -> list[dict[str, Any]]:
        """Return the ``boxes`` of each image, in order of descending score.

        Each has ``class``, ``score`` and ``box``: left, top, right and bottom in pixels of the image before
        it was resized. Detections in the padding are omitted.
        """
        assert batch.sides is not None
        return [
            {"boxes": self._boxes(output, (height, width))}
            for output, (height, width) in zip(outputs, batch.sides.tolist(), strict=True)
        ]

    def _boxes(self, output: dict[str, Tensor], sides: tuple[int, int]) -> list[dict[str, Any]]:
        boxes, are_inside = fitted_back(sides, self._canvas).boxes(at_least_float32(output["boxes"]))
        order = output["scores"].argsort(descending=True, stable=True)
        order = order[are_inside[order]]
        rows = zip(
            *(column[order].tolist() for column in (output["labels"], output["scores"], boxes)), strict=True
        )
        return [{"class": self._class_name(label), "score": score, "box": box} for label, score, box in rows]

    def picture(
        self, outputs: list[dict[str, Tensor]], batch: Batch, place: int, image: Image.Image
    ) -> Image.Image:
        """Return the image with its boxes, beside the image with the detections over them.

        Ground truth is dashed and white, crowds gray; detections have the color of their class. The error is
        the difference between their numbers, added up over the classes.
        """
        targets = [batch.targets[name][place].tolist() for name in self.target_spec]
        boxes = [
            drawing.Box(
                corners,
                self._short(label),
                drawing.GRAY if is_crowd else drawing.WHITE,
                is_dashed=True,
            )
            for corners, label, is_crowd in zip(*targets, strict=True)
        ]
        unnamed = [replace(box, text="") for box in boxes]
        detections = self._shown(outputs[place])
        shown = drawing.panels(
            [
                ("ground truth", drawing.with_boxes(image, boxes)),
                ("prediction", drawing.with_boxes(image, [*unnamed, *detections])),
            ]
        )
        true = Counter(box.text for box in boxes)
        predicted = Counter(box.text.rpartition(" ")[0] for box in detections)
        wrong = (true - predicted) + (predicted - true)
        lines = [f"{len(boxes)} in the ground truth, {counted(len(detections), 'detection')}"]
        return drawing.described(shown, classes=sorted(true | predicted), error=wrong.total(), lines=lines)

    def _shown(self, output: dict[str, Tensor]) -> list[drawing.Box]:
        """Return the detections that are drawn, in order of ascending score."""
        rows = zip(*(output[name].tolist() for name in ("scores", "labels", "boxes")), strict=True)
        certain = sorted((row for row in rows if row[0] >= _SHOWN_SCORE), key=lambda row: row[0])
        return [
            drawing.Box(corners, f"{self._short(label)} {score:.2f}", drawing.color_of(label - 1))
            for score, label, corners in certain[-_SHOWN:]
        ]

    def _class_name(self, label: int) -> str | int:
        has_names = len(self._class_names) == self._num_classes and 1 <= label <= self._num_classes
        return self._class_names[label - 1] if has_names else label

    def _short(self, label: int) -> str:
        return drawing.short(self._class_name(label))


def _training_targets(batch: Batch) -> list[dict[str, Tensor]]:
    """Return boxes and labels of each sample without crowds; boxes have the dtype of the images."""
    targets = zip(*(batch.targets[name] for name in ("boxes", "labels", "iscrowd")), strict=True)
    return [
        {"boxes": boxes[crowds == 0].to(batch.inputs.dtype), "labels": labels[crowds == 0]}
        for boxes, labels, crowds in targets
    ]


def _rows(boxes: Tensor, *columns: Tensor) -> Tensor:
    return torch.cat([at_least_float32(boxes), *(column[:, None] for column in columns)], dim=1)


def average_precision(
    detections: Sequence[Tensor], boxes: Sequence[Tensor], num_classes: int
) -> tuple[float, float]:
    """Return the mean over classes at IoU 0.5 to 0.95, and at IoU 0.5, with 100 detections per image.

    ``detections``: for each of N samples (D, 6) of left, top, right, bottom, label and score; ``boxes``: for
    each (K, 6), whose last column is 1 for a crowd, else 0. Both results are 0 if there are no boxes.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    table = _table(detections)
    if len(table) == 0 or sum(map(len, boxes)) == 0:
        return 0.0, 0.0
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = COCO()
        truth.dataset = _dataset(boxes, num_classes)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(table[:, [0, 1, 2, 3, 4, 6, 5]]), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # -1 if no box counts because all are crowds.
    return max(0.0, float(evaluation.stats[0])), max(0.0, float(evaluation.stats[1]))


def _dataset(boxes: Sequence[Tensor], num_classes: int) -> dict[str, list[dict[str, Any]]]:
    annotations = [
        {
            "id": number,
            "image_id": int(image),
            "category_id": int(label),
            "bbox": [left, top, width, height],
            "area": width * height,
            "iscrowd": int(is_crowd),
        }
        for number, (image, left, top, width, height, label, is_crowd) in enumerate(
            _table(boxes).tolist(), start=1
        )
    ]
    return {
        "images": [{"id": number} for number in range(len(boxes))],
        "categories": [{"id": label} for label in range(1, num_classes + 1)],
        "annotations": annotations,
    }


def _table(rows: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """Return the rows of all samples: sample, left, top, width, height, and the last two columns."""
    table = [
        np.concatenate([np.full((len(values), 1), sample), values.double().numpy()], axis=1)
        for sample, values in enumerate(rows)
    ]
    stacked = np.concatenate(table) if table else np.zeros((0, 7))
    stacked[:, 3:5] -= stacked[:, 1:3]
    return stacked
