from __future__ import annotations

import torch
from torchvision.transforms.v2 import functional as tvf

from hpc_train.config.training_sections import AugmentConfig, ColorJitterConfig
from hpc_train.datasets.augment import Augmentation
from hpc_train.datasets.color_jitter import color_jitter
from hpc_train.datasets.random_numbers import Keys
from tests.datasets.samples import random_images

ALL = ColorJitterConfig(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1)


def test_a_sample_is_jittered_the_same_alone_and_in_any_batch() -> None:
    images, samples = random_images(8), torch.arange(8) * 5
    batch = color_jitter(images, Keys(0, 2, samples), ALL)
    alone = [color_jitter(images[i : i + 1], Keys(0, 2, samples[i : i + 1]), ALL) for i in range(8)]
    assert torch.equal(batch, torch.cat(alone))
    assert not torch.equal(batch, color_jitter(images, Keys(0, 3, samples), ALL))


def test_factors_are_those_of_torchvision_within_their_bounds() -> None:
    image = random_images(1).expand(300, -1, -1, -1)
    keys = Keys(0, 0, torch.arange(300))
    factors = 1 + (2 * keys.uniform("color_jitter.brightness") - 1) * 0.4
    jittered = color_jitter(image, keys, ColorJitterConfig(brightness=0.4))
    for place in range(0, 300, 50):
        assert torch.equal(jittered[place], tvf.adjust_brightness(image[0], float(factors[place])))
    assert 0.6 <= factors.min() < 0.65 and 1.35 < factors.max() <= 1.4


def test_the_order_is_random() -> None:
    image = random_images(1).expand(50, -1, -1, -1)
    keys = Keys(0, 0, torch.arange(50))
    config = ColorJitterConfig(brightness=0.9, contrast=0.9)
    bright = (1 + (2 * keys.uniform("color_jitter.brightness") - 1) * 0.9).tolist()
    contrast = (1 + (2 * keys.uniform("color_jitter.contrast") - 1) * 0.9).tolist()
    first = [
        torch.equal(each, tvf.adjust_contrast(tvf.adjust_brightness(image[0], b), c))
        for each, b, c in zip(color_jitter(image, keys, config), bright, contrast, strict=True)
    ]
    assert 10 < sum(first) < 50


def test_gray_images_have_no_hue_and_the_key_reaches_the_augmentation() -> None:
    gray = random_images(4, channels=1)
    keys = Keys(0, 0, torch.arange(4))
    assert torch.equal(color_jitter(gray, keys, ColorJitterConfig(hue=0.5, saturation=1.0)), gray)
    augment = Augmentation(AugmentConfig(color_jitter=ALL), None, 0)
    images = random_images(4)
    assert torch.equal(augment(images, 0, torch.arange(4)), color_jitter(images, keys, ALL))
