from __future__ import annotations

import torch

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import ArraySplit
from hpc_train.training.datasets.sources.synthetic import build


def synthetic(**args: object):
    return build("", DataConfig(name="synthetic", args=args), download=False)


def batch(split: object, indices: torch.Tensor):
    assert isinstance(split, ArraySplit)
    return split.batch(indices)


def test_sizes_are_those_asked_for() -> None:
    made = synthetic(num_samples=7, image_size=5, channels=2, num_classes=3)
    images, classes = batch(made.train, torch.arange(7))
    assert images.shape == (7, 2, 5, 5)
    assert images.dtype == torch.uint8
    assert set(classes.tolist()) == {0, 1, 2}
    assert made.val is not None
    assert (len(made.train), len(made.val)) == (7, 1)
    assert made.info.num_classes == 3


def test_a_sample_is_always_the_same_and_no_two_are_equal() -> None:
    made = synthetic()
    images, classes = batch(made.train, torch.tensor([5, 900, 5]))
    image, target = batch(synthetic().train, torch.tensor([900]))
    assert torch.equal(images[1], image[0])
    assert target.tolist() == [int(classes[1])]
    assert torch.equal(images[0], images[2])
    many, _ = batch(made.train, torch.arange(0, 1024, 10))
    assert len(many.flatten(1).unique(dim=0)) == len(many)


def test_validation_holds_other_images_of_the_same_classes() -> None:
    made = synthetic()
    train, train_classes = batch(made.train, torch.arange(20))
    val, val_classes = batch(made.val, torch.arange(20))
    assert torch.equal(train_classes, val_classes)
    assert not (train == val).flatten(1).all(dim=1).any()


def test_classes_can_be_distinguished_on_images_never_seen() -> None:
    made = synthetic()
    train, train_classes = batch(made.train, torch.arange(1024))
    centres = torch.stack([train[train_classes == k].double().mean(dim=0) for k in range(10)]).flatten(1)
    val, val_classes = batch(made.val, torch.arange(200))
    nearest = torch.cdist(val.double().flatten(1), centres).argmin(dim=1)
    assert (nearest == val_classes).double().mean() > 0.99


def test_mean_and_std_are_near_the_truth() -> None:
    made = synthetic(num_classes=200)
    images, _ = batch(made.train, torch.arange(1000))
    assert abs(images.double().mean() / 255 - made.info.mean[0]) < 0.02
    assert abs(images.double().std() / 255 - made.info.std[0]) < 0.02


def test_a_billion_images_cost_nothing_until_asked_for() -> None:
    made = synthetic(num_samples=10**9)
    assert batch(made.train, torch.tensor([10**9 - 1]))[1].tolist() == [9]
