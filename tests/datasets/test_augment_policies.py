from __future__ import annotations

from collections import Counter

import pytest
import torch
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from hpc_train.datasets.augment_policies import AUTOAUGMENT, augmented, wide_level
from hpc_train.datasets.randaugment import OPERATIONS, apply, level, randaugment
from hpc_train.datasets.random_numbers import Keys
from tests.datasets.samples import random_images

POLICIES = {
    "autoaugment": AutoAugmentPolicy.IMAGENET,
    "autoaugment_cifar10": AutoAugmentPolicy.CIFAR10,
    "autoaugment_svhn": AutoAugmentPolicy.SVHN,
}


@pytest.mark.parametrize("name", POLICIES)
def test_sub_policies_are_torchvisions(name: str) -> None:
    ours = [
        tuple((each.name, each.probability, each.magnitude) for each in operations)
        for operations in AUTOAUGMENT[name]
    ]
    theirs = [
        tuple((name, probability, magnitude or 0) for name, probability, magnitude in operations)
        for operations in v2.AutoAugment(POLICIES[name])._policies
    ]
    assert ours == theirs
    assert len(ours) == 25


@pytest.mark.parametrize("height", [20, 331])
def test_strengths_are_torchvisions(height: int) -> None:
    auto, wide = v2.AutoAugment()._AUGMENTATION_SPACE, v2.TrivialAugmentWide()._AUGMENTATION_SPACE
    assert list(wide) == list(OPERATIONS) and {*auto} == {*OPERATIONS, "Invert"} - {"Identity"}
    assert {name: sign for name, (_, sign) in wide.items()} == {
        n: sign for n, (_, sign) in OPERATIONS.items()
    }
    for name in OPERATIONS:
        theirs = wide[name][0](31, height, 30)
        if theirs is not None:
            assert [wide_level(name, magnitude) for magnitude in range(31)] == theirs.tolist()
        if name != "Identity" and (theirs := auto[name][0](10, height, 30)) is not None:
            assert [level(name, magnitude, height, 30, 10) for magnitude in range(10)] == theirs.tolist()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("policy", [*POLICIES, "trivialaugment"])
def test_pixels_are_those_of_torchvisions_operations(policy: str, channels: int) -> None:
    """Each image is what torchvision's operations make of it with some choice of the random numbers."""
    images, samples = list(random_images(40, channels, 20, 30)), torch.arange(40)
    theirs = v2.TrivialAugmentWide() if policy == "trivialaugment" else v2.AutoAugment(POLICIES[policy])

    def applied(image: torch.Tensor, name: str, strength: float) -> torch.Tensor:
        return theirs._apply_image_or_video_transform(
            image, name, strength, InterpolationMode.NEAREST, theirs._fill
        )

    found = augmented(images, Keys(3, 1, samples), policy)
    keys = Keys(3, 1, samples)
    for place, original in enumerate(images):
        image = original
        if policy == "trivialaugment":
            name = list(OPERATIONS)[keys.integers(policy, 0, 14)[place]]
            strength = wide_level(name, int(keys.integers("trivialaugment.magnitude", 0, 31)[place]))
            sign = OPERATIONS[name][1] and bool(keys.flags("trivialaugment.sign", 0.5)[place])
            image = applied(image, name, -strength if sign else strength)
        else:
            row = AUTOAUGMENT[policy][keys.integers(policy, 0, 25)[place]]
            for number, each in enumerate(row):
                if keys.uniform(f"{policy}.{number}")[place] < each.probability:
                    magnitudes = theirs._AUGMENTATION_SPACE[each.name][0](10, 20, 30)
                    strength = 0.0 if magnitudes is None else float(magnitudes[each.magnitude])
                    sign = theirs._AUGMENTATION_SPACE[each.name][1]
                    negative = sign and bool(keys.flags(f"{policy}.{number}.sign", 0.5)[place])
                    image = applied(image, each.name, -strength if negative else strength)
        assert torch.equal(found[place], image)
    assert sum(not torch.equal(a, b) for a, b in zip(images, found, strict=True)) > 20


@pytest.mark.parametrize("policy", [*POLICIES, "trivialaugment"])
def test_a_sample_is_augmented_equally_alone_and_in_a_batch(policy: str) -> None:
    images, samples = list(random_images(32)), torch.arange(32) + 7
    batch = augmented(images, Keys(0, 1, samples), policy)
    for place, image in enumerate(images):
        (alone,) = augmented([image], Keys(0, 1, samples[place : place + 1]), policy)
        assert torch.equal(alone, batch[place])


def test_the_strength_of_randaugment_is_normally_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "hpc_train.datasets.randaugment._apply_at",
        lambda image, name, magnitude, negative: seen.append(magnitude) or image,
    )
    images = list(random_images(1).expand(4000, -1, -1, -1))
    randaugment(images, Keys(0, 0, torch.arange(4000)), 1, 15, 3.0)
    drawn = torch.tensor(seen, dtype=torch.float64)
    assert drawn.mean().item() == pytest.approx(15, abs=0.2)
    assert drawn.std().item() == pytest.approx(3, abs=0.15)
    seen.clear()
    randaugment(images, Keys(0, 0, torch.arange(4000)), 1, 29, 3.0)
    counts = Counter(seen)
    assert max(counts) == 30 and counts[30] > counts[29]
    seen.clear()
    randaugment(images[:3], Keys(0, 0, torch.arange(3)), 2, 9)
    assert seen == [9] * 6


def test_an_operation_is_negated_only_where_it_has_a_sign() -> None:
    (image,) = random_images(1)
    for name in ("Rotate", "Solarize"):
        strength = level(name, 9, 12, 12)
        same = torch.equal(apply(image, name, strength, True), apply(image, name, strength, False))
        assert same == (name == "Solarize")
