from __future__ import annotations

import torch
from torchvision.transforms import v2

from hpc_train.datasets.random_numbers import Keys
from hpc_train.datasets.rectangles import erased_parts, resized_crops

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def crops_of(height: int, width: int, count: int = 4000):
    sizes = torch.full((count,), height), torch.full((count,), width)
    return resized_crops(Keys(0, 0, torch.arange(count)), *sizes, SCALE, RATIO)


def test_crops_are_inside_their_images() -> None:
    samples = torch.arange(2000)
    heights = Keys(0, 1, samples).integers("h", 1, 300)
    widths = Keys(0, 1, samples).integers("w", 1, 300)
    crops = resized_crops(Keys(0, 0, samples), heights, widths, SCALE, RATIO)
    assert (crops.heights >= 1).all()
    assert (crops.widths >= 1).all()
    assert (crops.tops >= 0).all()
    assert (crops.lefts >= 0).all()
    assert (crops.tops + crops.heights <= heights).all()
    assert (crops.lefts + crops.widths <= widths).all()


def test_crops_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    crops = crops_of(375, 500)
    image = torch.empty(3, 375, 500)
    transform = v2.RandomResizedCrop(224, scale=SCALE, ratio=RATIO)
    theirs = [transform.make_params([image]) for _ in range(2000)]
    for ours, name in [
        (crops.tops, "top"),
        (crops.lefts, "left"),
        (crops.heights, "height"),
        (crops.widths, "width"),
    ]:
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
