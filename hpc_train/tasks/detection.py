"""``task: detection``: boxes of objects and their classes, by a model that computes its own losses.

Legend: B samples, C classes, K boxes of a sample, D detections in it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.schema import Experiment
from hpc_train.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.errors import BadFileError


class Detection:
    """For detectors with the interface of torchvision's.

    In training ``model(images, targets)`` returns a dict of losses, of which the sum is minimized; in
    evaluation ``model(images)`` returns for each image a dict with ``boxes`` (D, 4), ``labels`` (D,) and
    ``scores`` (D,). Labels are 1…C.
    """

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        if find_spec("pycocotools") is None:
            raise BadFileError(
                "task: detection computes its metrics by pycocotools, which is not installed; run "
                "pip install 'hpc-train[detection]'"
            )
        self._num_classes = experiment.model.args.get("num_classes", info.num_classes)
        self.target_spec = {
            "boxes": TargetSpec(
                "the corners of boxes",
                kind="float",
                shape=(None, 4),
                minimum=0,
                is_ragged=True,
                geometry="boxes",
            ),
            "labels": TargetSpec(
                "a class number per box",
                kind="integer",
                shape=(None,),
                minimum=1,
                maximum=self._num_classes,
                is_ragged=True,
                geometry="per box",
            ),
            "iscrowd": TargetSpec(
                "1 for each box of a crowd, else 0",
                kind="integer",
                shape=(None,),
                minimum=0,
                maximum=1,
                is_ragged=True,
                geometry="per box",
            ),
        }

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the losses by name, or in evaluation the detections of each image."""
        return model(batch.inputs, _to_learn(batch)) if model.training else model(batch.inputs)

    def loss(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum of the model's losses, each a mean over the micro-batch."""
        return torch.stack([_at_least_float32(loss) for loss in outputs.values()]).sum()

    def sums(self, outputs: list[dict[str, Tensor]], batch: Batch) -> dict[str, Any]:
        """Return ``count``, and as records ``detections`` (D, 6) and ``boxes`` (K, 6).

        Left, top, right, bottom and the label, and then the score or whether it is a crowd.
        """
        targets = zip(*(batch.targets[name] for name in self.target_spec), strict=True)
        return {
            "count": batch.valid.sum(dtype=torch.float64),
            "detections": [_rows(each["boxes"], each["labels"], each["scores"]) for each in outputs],
            "boxes": [_rows(*target) for target in targets],
        }

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return COCO's average precision ``map`` (IoU 0.5 to 0.95) and ``map50`` (IoU 0.5)."""
        from hpc_train.tasks.average_precision import average_precision

        precision, at_50 = average_precision(sums["detections"], sums["boxes"], self._num_classes)
        return {"map": precision, "map50": at_50}


def _to_learn(batch: Batch) -> list[dict[str, Tensor]]:
    """Return boxes and labels of each sample without crowds, in the precision of the images."""
    targets = zip(*(batch.targets[name] for name in ("boxes", "labels", "iscrowd")), strict=True)
    return [
        {"boxes": boxes[crowds == 0].to(batch.inputs.dtype), "labels": labels[crowds == 0]}
        for boxes, labels, crowds in targets
    ]


def _rows(boxes: Tensor, *columns: Tensor) -> Tensor:
    return torch.cat([_at_least_float32(boxes), *(column[:, None] for column in columns)], dim=1)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
