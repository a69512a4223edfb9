"""COCO's average precision of detections, by pycocotools (optional extra ``detection``).

Legend: N samples, C classes, K boxes of a sample, D detections in it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from torch import Tensor


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
