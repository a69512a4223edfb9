from __future__ import annotations

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from hpc_train.datasets.randaugment import OPERATIONS, level, randaugment
from hpc_train.datasets.random_numbers import Keys
from tests.datasets.samples import random_images


def test_operations_and_their_order_are_torchvisions() -> None:
    assert list(OPERATIONS) == list(v2.RandAugment._AUGMENTATION_SPACE)
    signed = {name: is_signed for name, (_, is_signed) in OPERATIONS.items()}
    assert signed == {name: value[1] for name, value in v2.RandAugment._AUGMENTATION_SPACE.items()}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_equals_torchvisions_bitwise(name: str, magnitude: int, channels: int) -> None:
    image = random_images(1, channels, 20, 30)[0]
    theirs = v2.RandAugment()
    magnitudes = theirs._AUGMENTATION_SPACE[name][0](31, 20, 30)
    strength = 0.0 if magnitudes is None else float(magnitudes[magnitude])
    expected = theirs._apply_image_or_video_transform(
        image, name, strength, InterpolationMode.NEAREST, theirs._fill
    )
    operation, _ = OPERATIONS[name]
    assert torch.equal(operation(image, level(name, magnitude, 20, 30)), expected)
    if magnitudes is not None:
        assert level(name, magnitude, 20, 30) == strength


def test_a_sample_is_augmented_equally_alone_and_in_a_batch() -> None:
    images, samples = list(random_images(32)), torch.arange(32) + 7
    batch = randaugment(images, Keys(0, 1, samples), 2, 9)
    for place, image in enumerate(images):
        (alone,) = randaugment([image], Keys(0, 1, samples[place : place + 1]), 2, 9)
        assert torch.equal(alone, batch[place])
    assert sum(not torch.equal(a, b) for a, b in zip(images, batch, strict=True)) > 20
