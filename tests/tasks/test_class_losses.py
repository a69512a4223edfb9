"""Losses of classification are those of torch, torchvision and timm on the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from torch import Tensor
from torch.nn import functional
from torchvision.ops import sigmoid_focal_loss

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import LossConfig
from hpc_train.experiment.data_facts.facts import CLASSIFICATION_LOSSES
from hpc_train.training.tasks.class_losses import ClassLoss, make_class_loss

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(4, (6,), generator=GENERATOR)
SHARES = torch.rand(6, 4, generator=GENERATOR, dtype=torch.float64).softmax(1)
LABELS = torch.randint(2, (6, 4), generator=GENERATOR)
WEIGHTS = [0.5, 1.0, 2.0, 0.25]


def loss(name: str, *, has_several: bool = False, **args: Any) -> ClassLoss:
    return make_class_loss(LossConfig(name=name, args=args), 4, has_several=has_several)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("targets", [CLASSES, SHARES])
def test_cross_entropy_is_torchs(targets: Tensor) -> None:
    expected = functional.cross_entropy(LOGITS, targets, label_smoothing=0.1)
    assert torch.equal(loss("cross_entropy").mean(LOGITS, targets, 0.1), expected)


@pytest.mark.parametrize("targets", [CLASSES, SHARES])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_cross_entropy_are_torchs(targets: Tensor, smoothing: float) -> None:
    """Class targets are divided by the sum of their weights, soft targets by the number of samples."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = functional.cross_entropy(LOGITS, targets, weight=weights, label_smoothing=smoothing)
    assert_equal(loss("cross_entropy", class_weights=WEIGHTS).mean(LOGITS, targets, smoothing), expected)


def test_a_class_of_weight_zero_does_not_count() -> None:
    weighted = loss("cross_entropy", class_weights=[1.0, 2.0, 0.0, 1.0])
    classes = torch.tensor([0, 1, 2, 3, 2, 0])
    found = weighted.mean(LOGITS, classes, 0.1)
    assert_equal(found, weighted.mean(LOGITS[classes != 2], classes[classes != 2], 0.1))
    assert weighted.mean(LOGITS, torch.full((6,), 2), 0.1) == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_of_one_class_is_timms(smoothing: float) -> None:
    expected = TimmBinaryCrossEntropy(smoothing=smoothing)(LOGITS.float(), CLASSES)
    found = loss("bce").mean(LOGITS.float(), CLASSES, smoothing)
    torch.testing.assert_close(found, expected)


def test_bce_of_several_classes_is_torchs() -> None:
    pos_weight, weight = [1.0, 2.0, 3.0, 4.0], torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = functional.binary_cross_entropy_with_logits(
        LOGITS, LABELS.double() * 0.9 + 0.05, weight=weight, pos_weight=torch.tensor(pos_weight).double()
    )
    found = loss("bce", has_several=True, class_weights=WEIGHTS, pos_weight=pos_weight)
    assert_equal(found.mean(LOGITS, LABELS, 0.1), expected)


def test_focal_loss_of_several_classes_is_torchvisions() -> None:
    expected = sigmoid_focal_loss(LOGITS, LABELS.double(), alpha=-1, gamma=1.5, reduction="mean")
    assert_equal(loss("focal", has_several=True, gamma=1.5).mean(LOGITS, LABELS, 0.0), expected)


def test_focal_loss_of_one_class_is_that_of_the_paper() -> None:
    chances = LOGITS.softmax(1)[range(6), CLASSES]
    expected = -(torch.tensor(WEIGHTS)[CLASSES] * (1 - chances) ** 2 * chances.log())
    assert_equal(loss("focal", class_weights=WEIGHTS)(LOGITS, CLASSES), expected)


@pytest.mark.parametrize("has_several", [False, True])
def test_focal_loss_without_gamma_is_cross_entropy(has_several: bool) -> None:
    targets = LABELS if has_several else SHARES
    found = loss("focal", has_several=has_several, gamma=0.0)
    other = loss("bce" if has_several else "cross_entropy", has_several=has_several)
    assert_equal(found.mean(LOGITS, targets, 0.1), other.mean(LOGITS, targets, 0.1))


@pytest.mark.parametrize("has_several", [False, True])
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_of_a_certain_prediction_has_a_finite_slope(gamma: float, has_several: bool) -> None:
    logits = torch.tensor([[200.0, -200.0, -200.0, -200.0]], requires_grad=True)
    found = loss("focal", has_several=has_several, gamma=gamma)(logits, torch.tensor([0]))
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert found.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("name", CLASSIFICATION_LOSSES)
@pytest.mark.parametrize("has_several", [False, True])
def test_every_loss_has_an_implementation(name: str, has_several: bool) -> None:
    targets = LABELS.double() if has_several else CLASSES
    assert loss(name, has_several=has_several)(LOGITS, targets).shape == (6,)


@pytest.mark.parametrize(("name", "key"), [("focal", "class_weights"), ("bce", "pos_weight")])
def test_weights_are_one_per_class(name: str, key: str) -> None:
    with pytest.raises(BadFileError, match=rf"{key}: has 3 values, and the data have 4 classes; write"):
        loss(name, **{key: [1.0, 2.0, 3.0]})
