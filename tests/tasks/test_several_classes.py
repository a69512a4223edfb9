"""Multi-label classification: scikit-learn's metrics on the same predictions, exact over micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.training.datasets.targets import MisfitError, TargetCheck
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.classification import Classification
from tests.tasks import test_classification
from tests.tasks.test_classification import experiment

NUM_CLASSES = 5
INFO = DataInfo(NUM_CLASSES, 3, (0.5,) * 3, (0.5,) * 3, target_shape=(NUM_CLASSES,))


def samples(size: int = 60) -> tuple[Tensor, Tensor]:
    """Logits with ties, and labels of which the last class has none."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-4, 5, (size, NUM_CLASSES), generator=generator) / 2 - 0.25
    labels = torch.randint(2, (size, NUM_CLASSES), generator=generator)
    labels[:, -1] = 0
    return logits, labels


def task(loss: str | None = None) -> Classification:
    given = experiment()
    changed = given.optimization.model_validate(given.optimization.model_dump() | {"loss": loss})
    return Classification(given.model_copy(update={"optimization": changed}), INFO)


def batch(targets: Tensor, valid: Tensor | None = None) -> Batch:
    return test_classification.batch(targets, targets, valid)


def metrics(of: Classification, logits: Tensor, labels: Tensor) -> dict[str, float]:
    found = of.sums(logits, batch(labels))
    return of.metrics({name: value.item() if _is_number(value) else value for name, value in found.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def test_metrics_are_scikit_learns() -> None:
    from sklearn.metrics import accuracy_score, average_precision_score, f1_score

    logits, labels = samples()
    found, predicted = metrics(task(), logits, labels), logits >= 0
    present = slice(0, NUM_CLASSES - 1)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    for average in ("micro", "macro"):
        expected = f1_score(labels, predicted, average=average, zero_division=0.0)
        assert found[f"f1_{average}"] == pytest.approx(expected)
    expected = average_precision_score(labels[:, present], logits[:, present], average="macro")
    assert found["map_multilabel"] == pytest.approx(expected, rel=1e-12)
    bce = functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert found["loss"] == pytest.approx(bce.item(), rel=1e-6)


def test_the_outcomes_of_each_class_are_kept_as_a_table() -> None:
    from sklearn.metrics import multilabel_confusion_matrix

    logits, labels = samples()
    found = task().sums(logits, batch(labels))
    lines = task().files(found)["confusion_per_class.csv"].decode().splitlines()
    assert lines[0] == "class,true_positives,false_positives,false_negatives,true_negatives"
    matrices = multilabel_confusion_matrix(labels, logits >= 0)
    ((tn, fp), (fn, tp)) = matrices[2]
    assert lines[3] == f"2,{tp},{fp},{fn},{tn}"


def test_samples_that_only_fill_up_count_for_nothing() -> None:
    logits, labels = samples()
    valid = torch.arange(60) % 7 > 0
    found = task().sums(logits, batch(labels, valid))
    alone = task().sums(logits[valid], batch(labels[valid]))
    for name in ("count", "correct", "outcomes"):
        assert torch.equal(found[name], alone[name]), name
    torch.testing.assert_close(found["loss"], alone["loss"])


def test_shares_of_classes_are_the_targets_of_cross_entropy() -> None:
    logits, _ = samples()
    shares = torch.rand(60, NUM_CLASSES, generator=torch.Generator().manual_seed(0)).softmax(1)
    found = metrics(task("cross_entropy"), logits, shares)
    assert found["loss"] == pytest.approx(functional.cross_entropy(logits, shares).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == shares.argmax(1)).double().mean().item())


@pytest.mark.parametrize(
    ("loss", "target", "said"),
    [
        (None, [0, 1, 2, 0, 0], "values 0 to 2, and task classification needs a yes .1. or no .0. per class"),
        (None, 3, r"3 \(int64 of shape \(\)\)"),
        ("cross_entropy", [0, 1, 0, 0, 0], "needs the share of each class .floating-point numbers of shape"),
        (
            "cross_entropy",
            [0.0, 1.0, 1.0, 0.0, 0.0],
            "needs the share of each class .*, with the sum 1",
        ),
        ("cross_entropy", [0.0, 0.0, 0.0, 0.0, 0.0], "with the sum 1"),
    ],
)
def test_other_targets_are_refused(loss: str | None, target: Any, said: str) -> None:
    with pytest.raises(MisfitError, match=said):
        TargetCheck("classification", task(loss).target_spec).one(target)
