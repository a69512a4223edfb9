"""timm's RandAugment: names and arguments are timm's, results those of its PIL operations."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import timm.data.auto_augment as theirs
import torch
from PIL import Image
from torch import Tensor

from hpc_train.datasets.random_numbers import Keys
from hpc_train.datasets.timm_randaugment import OPERATIONS, apply, timm_randaugment
from tests.datasets.samples import random_images

MAGNITUDES = (0, 2.5, 9, 10, 12)


def smooth_image(channels: int) -> Tensor:
    """Return an image (C, 32, 48) without edges, so that ways to interpolate hardly differ."""
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(48.0), indexing="ij")
    waves = [127 + 100 * torch.sin(rows / (9 + k)) * torch.cos(columns / (11 - k)) for k in range(channels)]
    return torch.stack(waves).to(torch.uint8)


def of_timm(name: str, image: Tensor, magnitude: float, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(theirs.random, "random", lambda: 0.25)  # applied, not negated
    hparams = {"interpolation": Image.Resampling.BILINEAR}
    operation: Any = theirs.AugmentOp(name, prob=0.5, magnitude=magnitude, hparams=hparams)
    pixels = image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy()
    if len(image) == 1:
        operation.kwargs["fillcolor"] = 128
    done = torch.from_numpy(np.array(operation(Image.fromarray(pixels))))
    return done[None] if len(image) == 1 else done.permute(2, 0, 1)


def test_operations_and_their_order_are_timms() -> None:
    assert list(OPERATIONS) == theirs._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_timm(name: str, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = name.startswith(("Rotate", "Shear", "Translate"))
    image = smooth_image(channels) if moves else random_images(1, channels, 32, 48)[0]
    for magnitude in MAGNITUDES:
        if name == "PosterizeIncreasing" and magnitude >= 10:  # no bit is left; Pillow refuses it
            assert not apply(image, name, magnitude, False).any()
            continue
        found, expected = apply(image, name, magnitude, False), of_timm(name, image, magnitude, monkeypatch)
        assert found.dtype == torch.uint8 and found.shape == image.shape
        differences = (found.int() - expected.int()).abs()
        # Arithmetic is rounded otherwise, and the edges of a moved image are blended with gray.
        assert (differences > (3 if moves else 1)).float().mean() < (0.05 if moves else 1e-9), magnitude


def test_magnitudes_probability_and_signs_come_from_the_samples_own_numbers() -> None:
    random.seed(1)
    before = random.getstate()
    images, samples = list(random_images(48)), torch.arange(48) + 7
    batch = timm_randaugment(images, Keys(0, 1, samples), 2, 9, 0.5)
    for place, image in enumerate(images):
        (alone,) = timm_randaugment([image], Keys(0, 1, samples[place : place + 1]), 2, 9, 0.5)
        assert torch.equal(alone, batch[place])
    changed = sum(not torch.equal(a, b) for a, b in zip(images, batch, strict=True))
    assert 26 <= changed <= 44  # each of two operations in half of the cases: 3/4
    assert random.getstate() == before
    never = timm_randaugment(images, Keys(0, 1, samples), 2, 9, 0.5, probability=0.0)
    assert all(torch.equal(a, b) for a, b in zip(images, never, strict=True))
