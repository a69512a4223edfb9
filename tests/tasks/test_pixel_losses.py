from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import LossConfig
from hpc_train.training.tasks import segmentation
from hpc_train.training.tasks.segmentation import make_pixel_loss

CLASSES = 4


def pixels(count: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (P, C), classes without the last one, and which pixels are labelled."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, CLASSES - 1, (count,), generator=generator)
    labelled = torch.rand(count, generator=generator) < 0.7
    return logits.requires_grad_(), torch.where(labelled, classes, 255), labelled


def as_image(logits: Tensor, classes: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pixels as one image of one row: (1, C, 1, P) and twice (1, 1, P)."""
    return logits.T[None, :, None], classes[None, None], labelled[None, None]


def loss(name: str, **args: Any) -> Tensor:
    return make_pixel_loss(LossConfig(name=name, args=args), CLASSES, 0.0)(*as_image(*pixels()))


def test_class_weights_are_torchs() -> None:
    logits, classes, _ = pixels()
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    expected = functional.cross_entropy(logits, classes, weight=weights, ignore_index=255)
    torch.testing.assert_close(loss("cross_entropy", class_weights=weights.tolist()), expected)
    with pytest.raises(BadFileError, match=r"class_weights: has 2 values, and the data have 4 classes"):
        loss("cross_entropy", class_weights=[1.0, 2.0])


def test_dice_is_one_less_the_mean_coefficient_of_the_classes_that_occur() -> None:
    logits, classes, labelled = pixels()
    chances = logits[labelled].softmax(1)
    terms = []
    for number in range(CLASSES - 1):
        truth = (classes[labelled] == number).double()
        both, sizes = (chances[:, number] * truth).sum(), chances[:, number].sum() + truth.sum()
        terms.append(1 - (2 * both + 1) / (sizes + 1))
    torch.testing.assert_close(loss("dice"), torch.stack(terms).mean())
    entropy = functional.cross_entropy(logits[labelled], classes[labelled])
    torch.testing.assert_close(loss("dice", cross_entropy=0.5), torch.stack(terms).mean() + 0.5 * entropy)


@pytest.mark.parametrize(("threshold", "min_kept"), [(0.7, 0.01), (0.001, 0.25)])
def test_ohem_keeps_hard_pixels_and_at_least_a_share(threshold: float, min_kept: float) -> None:
    logits, classes, labelled = pixels()
    each = functional.cross_entropy(logits[labelled], classes[labelled], reduction="none")
    hard = each[each.exp().reciprocal() < threshold]
    fewest = -int(-min_kept * len(each) // 1)
    expected = hard.mean() if len(hard) >= fewest else each.sort(descending=True).values[:fewest].mean()
    assert (len(hard) >= fewest) == (threshold == 0.7)
    torch.testing.assert_close(loss("ohem", threshold=threshold, min_kept=min_kept), expected)


def images() -> tuple[Tensor, Tensor, Tensor]:
    """Return four images of which one has no labelled pixel and the others have different numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, CLASSES, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(0, CLASSES, (4, 5, 7), generator=generator)
    shares = torch.tensor([0.9, 0.0, 0.1, 0.5])[:, None, None]
    return logits, classes, torch.rand(4, 5, 7, generator=generator) < shares


@pytest.mark.parametrize("name", ["cross_entropy", "dice", "ohem"])
def test_flat_pixels_have_the_loss_of_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices other than the CPU compute it of flat pixels."""
    logits, classes, labelled = images()
    compute = make_pixel_loss(LossConfig(name=name), CLASSES, 0.0)
    expected = compute(logits, classes, labelled)
    monkeypatch.setattr(segmentation, "_COMPUTE_IMAGES", ())
    found = compute(logits, classes, labelled)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (found, expected)))


@pytest.mark.parametrize("name", ["dice", "ohem"])
def test_dice_and_ohem_are_means_over_the_images_with_a_label(name: str) -> None:
    parts = images()
    compute = make_pixel_loss(LossConfig(name=name), CLASSES, 0.0)
    alone = [compute(*(part[place : place + 1] for part in parts)) for place in (0, 2, 3)]
    torch.testing.assert_close(compute(*parts), torch.stack(alone).mean())
    assert compute.weight(*parts[1:]) == 3


@pytest.mark.parametrize("name", ["cross_entropy", "dice", "ohem"])
def test_a_batch_without_labels_has_a_loss_of_zero_and_no_gradient(name: str) -> None:
    logits, classes, _ = pixels()
    nothing = torch.zeros(len(classes), dtype=torch.bool)
    found = make_pixel_loss(LossConfig(name=name), CLASSES, 0.0)(
        *as_image(logits, torch.full_like(classes, 255), nothing)
    )
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == 0 and logits.grad is not None and not logits.grad.any()
