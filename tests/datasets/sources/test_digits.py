from __future__ import annotations

import numpy as np
import torch

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.sources.digits import build


def digits(**args: object):
    return build("", DataConfig(name="digits", args=args), download=False)


def test_images_are_scikit_learns_enlarged_and_scaled() -> None:
    from sklearn.datasets import load_digits

    theirs, made = load_digits(), digits()
    assert isinstance(made.train, TensorSplit)
    assert isinstance(made.val, TensorSplit)
    is_val = np.arange(1797) % 5 == 4
    for split, chosen in ((made.train, ~is_val), (made.val, is_val)):
        expected = np.kron(np.round(theirs.images[chosen] * 255 / 16), np.ones((4, 4)))
        assert np.array_equal(split.images[:, 0].numpy(), expected)
        assert split.targets.tolist() == theirs.target[chosen].tolist()
        assert split.images.shape[1:] == (1, 32, 32)
    assert (len(made.train), len(made.val)) == (1438, 359)


def test_mean_and_std_are_those_of_the_training_images() -> None:
    made = digits()
    assert isinstance(made.train, TensorSplit)
    scaled = made.train.images.double() / 255
    assert abs(scaled.mean().item() - made.info.mean[0]) < 1e-4
    assert abs(scaled.std().item() - made.info.std[0]) < 1e-4


def test_three_channels_repeat_the_gray_one() -> None:
    made = digits(channels=3)
    images, _ = made.train.batch(torch.arange(4))  # type: ignore[attr-defined]
    assert images.shape == (4, 3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 2])
    assert len(made.info.mean) == made.info.channels == 3
