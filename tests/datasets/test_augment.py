from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.training.datasets.augment import (
    Augmentation,
    Rectangles,
    erased_parts,
    padded_crop,
    resized_crops,
)
from hpc_train.training.datasets.random_numbers import Keys
from tests.datasets.samples import random_images

ALL: list[dict[str, Any]] = [
    {},
    {"hflip": 0.5},
    {"vflip": 0.5},
    {"crop_padding": 3},
    {"random_resized_crop": {}},
    {"randaugment": {}},
    {"randaugment": {"magnitude_std": 3.0}},
    {"randaugment": {"operations": "timm", "magnitude_std": 0.5}},
    {"randaugment": {"probability": 0.5}},
    {"policy": "trivialaugment"},
    {"policy": "autoaugment"},
    {"random_resized_crop": {"interpolation": "random"}},
    {"erasing": 0.5},
    {"hflip": 0.5, "crop_padding": 2, "random_resized_crop": {}, "randaugment": {}, "erasing": 0.3},
]


def augmentation(config: dict[str, Any], image_size: int | None = None, seed: int = 0) -> Augmentation:
    return Augmentation(AugmentConfig.model_validate(config), image_size, seed)


@pytest.mark.parametrize("image_size", [None, 8])
@pytest.mark.parametrize("config", ALL, ids=lambda config: "+".join(config) or "none")
def test_a_sample_is_the_same_alone_and_in_any_batch(config: dict[str, Any], image_size: int | None) -> None:
    images, samples = random_images(16), torch.arange(16) * 3
    augment = augmentation(config, image_size)
    batch = augment(images, 5, samples)
    from_list = augment(list(images), 5, samples)
    alone = torch.cat([augment(images[i : i + 1], 5, samples[i : i + 1]) for i in range(16)])
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(batch, from_list)
    assert torch.equal(batch, alone)
    assert torch.equal(batch[shuffled], augment(images[shuffled], 5, samples[shuffled]))
    assert batch.dtype == torch.uint8


@pytest.mark.parametrize("config", ALL[1:], ids="+".join)
def test_seed_epoch_and_repeat_change_the_result_but_not_the_input(config: dict[str, Any]) -> None:
    images, samples = random_images(12), torch.arange(12)
    before = images.clone()
    first = augmentation(config)(images, 0, samples)
    assert not torch.equal(first, augmentation(config)(images, 1, samples))
    assert not torch.equal(first, augmentation(config)(images, 0, samples, repeat=1))
    assert not torch.equal(first, augmentation(config, seed=1)(images, 0, samples))
    assert torch.equal(first, augmentation(config)(images, 0, samples))
    assert torch.equal(images, before)


@pytest.mark.parametrize(("key", "dim"), [("hflip", -1), ("vflip", -2)])
def test_flips_turn_about_half_of_the_images(key: str, dim: int) -> None:
    images = random_images(400)
    flipped = augmentation({key: 0.5})(images, 0, torch.arange(400))
    turned = [torch.equal(a, b.flip(dim)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert sum(turned) + sum(kept) == 400
    assert 150 < sum(turned) < 250


def test_padded_crops_are_windows_of_the_padded_image() -> None:
    images, padding = random_images(50), 2
    cropped = padded_crop(images, Keys(0, 0, torch.arange(50)), padding)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    places = set()
    for image, crop in zip(padded, cropped, strict=True):
        fits = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(image[:, top : top + 12, left : left + 12], crop)
        ]
        assert len(fits) == 1
        places.add(fits[0])
    assert len(places) > 15


def test_erasing_sets_rectangles_to_zero_and_nothing_else() -> None:
    images = random_images(200).clamp(min=1)
    erased = augmentation({"erasing": 1.0})(images, 0, torch.arange(200))
    zero = (erased == 0).all(dim=1)
    assert torch.equal(erased * ~zero[:, None], images * ~zero[:, None])
    assert zero.any(dim=2).any(dim=1).double().mean() > 0.95
    rows, columns = zero.any(dim=2).sum(dim=1), zero.any(dim=1).sum(dim=1)
    assert torch.equal(rows * columns, zero.sum(dim=(1, 2)))  # whole rectangles


def test_image_size_brings_unequal_images_to_one_size() -> None:
    images = [random_images(1, 3, 20, 30)[0], random_images(1, 3, 9, 7)[0]]
    for config in ({}, {"random_resized_crop": {}}):
        assert augmentation(config, 8)(images, 0, torch.arange(2)).shape == (2, 3, 8, 8)


def test_float_images_are_flipped_and_cropped_but_not_randaugmented() -> None:
    images = random_images(8).float().sub(128)
    out = augmentation({"hflip": 0.5, "crop_padding": 2})(images, 0, torch.arange(8))
    as_bytes = augmentation({"hflip": 0.5, "crop_padding": 2})(random_images(8), 0, torch.arange(8))
    inside = out != 0
    assert torch.equal(out[inside], (as_bytes.float() - 128)[inside])
    for key, value in (("randaugment", {}), ("policy", "trivialaugment")):
        with pytest.raises(BadFileError, match=rf"data\.augment\.{key}: .*float32"):
            augmentation({key: value})(images, 0, torch.arange(8))


def test_crops_are_interpolated_as_the_file_says() -> None:
    images, samples = random_images(40, 3, 30, 20), torch.arange(40)

    def crops(interpolation: str | None, default: str = "bilinear") -> torch.Tensor:
        config = AugmentConfig.model_validate({"random_resized_crop": {"interpolation": interpolation}})
        return Augmentation(config, 16, 0, default)(images, 0, samples)

    bilinear, bicubic, mixed = crops("bilinear"), crops("bicubic"), crops("random")
    assert torch.equal(crops(None), bilinear) and torch.equal(crops(None, "bicubic"), bicubic)
    is_bilinear = (mixed == bilinear).flatten(1).all(dim=1)
    assert torch.equal(mixed[~is_bilinear], bicubic[~is_bilinear])
    assert 10 < int(is_bilinear.sum()) < 30


class _CountOperations(TorchDispatchMode):
    """Counts the tensor operations that run inside of it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_operations(config: dict[str, Any], num_samples: int) -> int:
    images, samples = random_images(num_samples, 3, 32, 32), torch.arange(num_samples)
    with _CountOperations() as operations:
        augmentation(config)(images, 0, samples)
    return operations.count


@pytest.mark.parametrize(
    "key", [{"hflip": 0.5}, {"vflip": 0.5}, {"crop_padding": 4}, {"erasing": 0.5}], ids="+".join
)
def test_a_larger_batch_takes_no_more_tensor_operations(key: dict[str, Any]) -> None:
    count_operations(key, 1)  # The first call of a process also makes the tables that later ones share.
    assert 0 < count_operations(key, 256) == count_operations(key, 8)


@pytest.mark.parametrize("key", ["hflip", "vflip"])
def test_flips_are_the_same_in_any_memory_layout(key: str) -> None:
    images, samples = random_images(32), torch.arange(32)
    as_decoded = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]
    augment = augmentation({key: 0.5})
    assert torch.equal(augment(as_decoded, 0, samples), augment(images, 0, samples))


SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def crops_of(height: int, width: int, count: int = 4000) -> Rectangles:
    sizes = torch.full((count,), height), torch.full((count,), width)
    return resized_crops(Keys(0, 0, torch.arange(count)), *sizes, SCALE, RATIO)


def test_crops_are_inside_their_images() -> None:
    samples = torch.arange(2000)
    heights = Keys(0, 1, samples).integers("h", 1, 300)
    widths = Keys(0, 1, samples).integers("w", 1, 300)
    crops = resized_crops(Keys(0, 0, samples), heights, widths, SCALE, RATIO)
    for begin, side, whole in ((crops.tops, crops.heights, heights), (crops.lefts, crops.widths, widths)):
        assert ((begin >= 0) & (side >= 1) & (begin + side <= whole)).all()


def test_crops_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    crops = crops_of(375, 500)
    image = torch.empty(3, 375, 500)
    transform = v2.RandomResizedCrop(224, scale=SCALE, ratio=RATIO)
    theirs = [transform.make_params([image]) for _ in range(2000)]
    for name in ("top", "left", "height", "width"):
        ours = getattr(crops, f"{name}s")
        expected = torch.tensor([float(params[name]) for params in theirs])
        assert abs(ours.double().mean() - expected.mean()) < 0.05 * 375
        assert abs(ours.double().std() - expected.std()) < 0.05 * 375


def test_a_long_thin_image_falls_back_to_the_centre() -> None:
    crops = crops_of(10, 1000)
    lost = ~crops.is_valid
    assert lost.any()
    assert crops.heights[lost].unique().tolist() == [10]
    assert crops.widths[lost].unique().tolist() == [13]
    assert crops.lefts[lost].unique().tolist() == [(1000 - 13) // 2]


def test_erased_parts_have_the_area_and_probability_asked_for() -> None:
    parts = erased_parts(Keys(0, 0, torch.arange(4000)), 100, 100, 0.25)
    assert abs(parts.is_valid.double().mean() - 0.25) < 0.03
    area = (parts.heights * parts.widths)[parts.is_valid].double() / 10_000
    assert area.min() > 0.015
    assert area.max() < 0.34
    assert abs(area.mean() - 0.175) < 0.02
    assert (parts.tops + parts.heights <= 100).all()
    assert (parts.lefts + parts.widths <= 100).all()
