from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.segmentation import Segmentation
from tests.tasks.test_classification import experiment

IGNORED = 11


def task(num_classes: int = 4, class_names: tuple[str, ...] = (), **keys: Any) -> Segmentation:
    info = DataInfo(num_classes, 3, (0.5,) * 3, (0.5,) * 3, class_names, ignore_index=IGNORED)
    return Segmentation(experiment(**keys), info)


def outputs(batch_size: int = 3, num_classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits (B, C, 6, 5) and masks with ignored pixels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch_size, num_classes, 6, 5, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, num_classes, (batch_size, 6, 5), generator=generator).to(torch.uint8)
    masks[:, 0] = IGNORED
    return logits, masks


def batch(masks: Tensor, valid: Tensor | None = None) -> Batch:
    everything = torch.ones(len(masks), dtype=torch.bool)
    return Batch(0, 0, 1.0, None, masks, everything if valid is None else valid)


def test_the_loss_is_the_mean_over_labelled_pixels() -> None:
    logits, masks = outputs()
    expected = functional.cross_entropy(logits, masks.long(), ignore_index=IGNORED)
    torch.testing.assert_close(task().loss(logits, batch(masks)), expected, rtol=1e-12, atol=0)
    smooth = functional.cross_entropy(logits, masks.long(), ignore_index=IGNORED, label_smoothing=0.1)
    ours = task(label_smoothing=0.1).loss(logits, batch(masks))
    torch.testing.assert_close(ours, smooth, rtol=1e-12, atol=0)


def test_an_auxiliary_output_counts_two_fifths_and_is_resized() -> None:
    logits, masks = outputs()
    small = torch.randn(3, 4, 3, 2, dtype=torch.float64)
    large = functional.interpolate(small, size=(6, 5), mode="bilinear", align_corners=False)
    expected = task().loss(logits, batch(masks)) + 0.4 * task().loss(large, batch(masks))
    torch.testing.assert_close(task().loss({"out": logits, "aux": small}, batch(masks)), expected)


def test_the_iou_of_each_class_is_optional() -> None:
    assert task(2, ("Traffic light", "sky")).optional_metrics == ["iou_traffic_light", "iou_sky"]


def test_metrics_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix, jaccard_score

    logits, masks = outputs(8)
    model = task(class_names=("Road", "Traffic light", "sky", "car"))
    sums = model.sums({"out": logits}, batch(masks))
    labelled = masks != IGNORED
    truth, predictions = masks[labelled], logits.argmax(1)[labelled]
    assert sums["confusion"].dtype == torch.int64
    assert torch.equal(sums["confusion"], torch.from_numpy(confusion_matrix(truth, predictions)))
    assert sums["count"] == labelled.sum()
    metrics = model.metrics({name: each.item() if each.dim() == 0 else each for name, each in sums.items()})
    ious = jaccard_score(truth, predictions, average=None)
    assert [metrics[f"iou_{name}"] for name in ("road", "traffic_light", "sky", "car")] == pytest.approx(ious)
    assert metrics["miou"] == pytest.approx(ious.mean())
    assert metrics["accuracy"] == pytest.approx((truth == predictions).double().mean().item())
    expected = functional.cross_entropy(logits, masks.long(), ignore_index=IGNORED)
    assert metrics["loss"] == pytest.approx(expected.item())


def test_a_prediction_of_a_channel_without_a_class_is_wrong() -> None:
    logits, masks = outputs(8, num_classes=6)
    masks[masks != IGNORED] %= 4
    sums = task().sums(logits, batch(masks))
    labelled = masks != IGNORED
    assert sums["confusion"].shape == (6, 6) and sums["confusion"].sum() == sums["count"] == labelled.sum()
    metrics = task().metrics({name: each.item() if each.dim() == 0 else each for name, each in sums.items()})
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == masks)[labelled].double().mean().item())
    assert metrics["iou_5"] == 0.0
    assert task().files(sums)["confusion.csv"].startswith(b"class,0,1,2,3,4,5\n")


def test_padding_counts_nowhere_even_as_nan() -> None:
    logits, masks = outputs(4)
    alone = task().sums(logits[:2], batch(masks[:2]))
    logits[2:] = torch.nan
    filled = task().sums(logits, batch(masks, torch.tensor([True, True, False, False])))
    assert all(torch.equal(alone[name], filled[name]) for name in alone)


def test_classes_that_never_occur_have_no_iou() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    metrics = task(3).metrics({"count": 8.0, "loss": 4.0, "confusion": confusion})
    assert metrics == {
        "loss": 0.5,
        "accuracy": 7 / 8,
        "miou": (3 / 4 + 4 / 5) / 2,
        "iou_0": 3 / 4,
        "iou_1": 4 / 5,
    }
    nothing = task(3).metrics({"count": 0.0, "loss": 0.0, "confusion": torch.zeros(3, 3, dtype=torch.int64)})
    assert nothing == {"loss": 0.0, "accuracy": 0.0, "miou": 0.0}


def test_the_confusion_matrix_is_kept_as_a_table() -> None:
    files = task(2, ("a b", "c")).files({"confusion": torch.tensor([[3, 1], [0, 4]])})
    assert files == {"confusion.csv": b"class,a_b,c\na_b,3,1\nc,0,4\n"}
