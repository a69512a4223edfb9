"""Transforms of torchvision, timm and the user run under the seed of their sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, v2

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.training.datasets.augment import Photometric
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.batches import evaluation_batches
from hpc_train.training.datasets.random_numbers import Keys, seed_generators
from hpc_train.training.datasets.sources.image_files import ImageFiles
from hpc_train.training.datasets.transforms import seeded
from hpc_train.training.datasets.types import Batch
from tests.datasets.samples import CPU, OneByOne, assert_equal, experiment, random_images, random_split, steps
from tests.datasets.test_joint import DETECTION, MASK, Boxed, Masked
from tests.datasets.test_joint import train as train_with_targets

HERE = "tests.datasets.test_transforms"
CAREFREE = "tests.end_to_end.parts:noise"
CROP = "torchvision.transforms.v2:RandomResizedCrop"
TRANSFORMS: dict[str, Any] = {
    "none": None,
    "own": CAREFREE,
    "torchvision": {"name": CROP, "args": {"size": 12}},
    "timm": {
        "name": "timm.data:create_transform",
        "args": {"input_size": 12, "is_training": True, "auto_augment": "rand-m9-mstd0.5-inc1"},
    },
}


def drawing() -> Callable[[Image.Image], Tensor]:
    """Return a transform whose result has a channel for one number of each generator."""

    def transform(image: Image.Image) -> Tensor:
        drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
        return drawn.view(3, 1, 1).expand(3, 4, 4)

    return transform


def failing(at: int) -> Callable[[Image.Image], Image.Image]:
    def transform(image: Image.Image) -> Image.Image:
        if np.asarray(image)[0, 0, 0] == at:
            raise ValueError("no light")
        return image

    return transform


def mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def none() -> Callable[[Image.Image], None]:
    return lambda image: None


def raising() -> None:
    raise KeyError("no file")


def joint(name: str) -> Any:
    """Return a transform of images with targets, as a user composes it of torchvision's."""
    return {
        "flip": v2.Compose([v2.RandomHorizontalFlip(1.0), v2.RandomPhotometricDistort(p=1.0)]),
        "crop": v2.RandomIoUCrop(min_scale=0.5),
        "crop and drop": v2.Compose([v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes(labels_getter=None)]),
        "centers": v2.ConvertBoundingBoxFormat("CXCYWH"),
        "no target": lambda image, target: image,
        "no labels": lambda image, target: (image, {"boxes": target["boxes"]}),
    }[name]


class SameMask(Masked):
    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        return super().__getitem__(0)


class SameBox(Boxed):
    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        return super().__getitem__(0)


def with_targets(split: Any, spec: Any, name: str, **keys: Any) -> list[Batch]:
    transform = {"name": f"{HERE}:joint", "args": {"name": name}}
    return train_with_targets(split, spec, **{"transform": transform, "augment": {}, **keys})


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("split", [random_split(20), OneByOne(random_split(20))], ids=["whole", "single"])
def test_batches_do_not_depend_on_workers_ranks_and_interruptions(transform: Any, split: Any) -> None:
    whole = steps(split, transform=transform)
    alone = {(slot.step, slot.number): slot.inputs for _, slots in whole for slot in slots}
    for _, slots in steps(split) if transform else ():
        assert not any(torch.equal(slot.inputs, alone[slot.step, slot.number]) for slot in slots)
    assert_equal(steps(split, transform=transform, workers=2), whole)
    assert_equal(steps(split, transform=transform, start=3), whole[3:])
    for rank in (0, 1):
        for _, slots in steps(split, transform=transform, rank=rank, world_size=2):
            assert all(torch.equal(slot.inputs, alone[slot.step, slot.number]) for slot in slots)


def test_evaluation_is_not_transformed() -> None:
    config = experiment(transform=CAREFREE)
    for split, spec in ((random_split(4), None), (SameMask(4), MASK)):
        found = list(evaluation_batches(split, config, 0, 1, CPU, None, spec))
        plain = list(evaluation_batches(split, experiment(), 0, 1, CPU, None, spec))
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(found, plain, strict=True))


def test_numbers_differ_by_sample_epoch_repeat_and_generator() -> None:
    keys: dict[str, Any] = {"transform": f"{HERE}:drawing", "augment": {"repeats": 2}}
    slots = [slot for _, slots in steps(random_split(20), **keys) for slot in slots]
    drawn = torch.cat([slot.inputs for slot in slots])[:, :, 0, 0]
    assert len(drawn) == 7 * 8 and len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_image_files_are_decoded_for_the_transform(suffix: str, tmp_path: Path) -> None:
    for index, image in enumerate(random_images(8)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{index}.{suffix}")
    ((_, slots),) = steps(ImageFiles(tmp_path, 3), transform=CAREFREE, total_steps=1)
    assert slots[0].inputs.shape == (2, 3, 12, 12)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_key_the_sample_and_the_line(workers: int) -> None:
    split = random_split(20)
    split.images[:, 0, 0, 0] = torch.arange(20)
    message = rf"^data\.transform: {HERE}:failing, called for sample 7, raised ValueError: no light"
    with pytest.raises(BadFileError, match=rf"{message} \(test_transforms\.py:\d+ in transform\); fix it"):
        steps(split, transform={"name": f"{HERE}:failing", "args": {"at": 7}}, workers=workers)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (f"{HERE}:nothing", r"^data\.transform: .*has no 'nothing'"),
        ({"name": CROP, "args": {"sides": 3}}, r"^data\.transform\.args: .*can't be called .*signature"),
        ({"name": CROP, "args": {"size": [1, 2, 3]}}, r"^data\.transform: .*raised ValueError: .*; fix it"),
        (f"{HERE}:raising", r"raised KeyError: 'no file' \(test_transforms\.py:\d+ in raising\)"),
        (f"{HERE}:mirrored", r"^data\.transform\.args: .*'image'.*; name a function that returns"),
        (f"{HERE}:CROP", r"^data\.transform: .*is str; name a function or a class"),
        ({"name": f"{HERE}:random_images", "args": {"count": 1}}, r"returned Tensor; return a function"),
        (f"{HERE}:none", r"called for sample \d+, returned what can't be an input: a sample is NoneType"),
    ],
)
def test_other_objects_are_refused(transform: Any, message: str) -> None:
    with pytest.raises(BadFileError, match=message):
        steps(random_split(20), transform=transform)


def test_masks_that_would_not_move_are_refused() -> None:
    images = random_images(8)
    with pytest.raises(BadFileError, match=r"^data\.transform: moves the pixels .* 12x12 target"):
        steps(TensorSplit(images, images[:, 0]), transform=CAREFREE)


def test_torchvision_moves_masks_with_their_images() -> None:
    image = Masked().image(0)
    for workers in (0, 1):
        for batch in with_targets(SameMask(4), MASK, "flip", workers=workers, image_size=None):
            assert torch.equal(batch.targets, (image[0] % 10).flip(-1).expand_as(batch.targets))
            assert batch.targets.dtype == torch.uint8 and type(batch.inputs) is type(batch.targets) is Tensor
            assert not torch.equal(batch.inputs[0], image.flip(-1))  # other colors


def test_torchvision_moves_boxes_with_their_images() -> None:
    plain = train_with_targets(SameBox(4), DETECTION, augment={}, image_size=None)[0].targets["boxes"][0]
    centers = with_targets(SameBox(4), DETECTION, "centers", image_size=None)[0].targets["boxes"][0]
    assert torch.equal(centers, plain) and type(centers) is Tensor
    flipped = with_targets(SameBox(4), DETECTION, "flip", image_size=None)[0].targets["boxes"][0]
    assert torch.equal(flipped[:, [2, 0]], 30 - plain[:, [0, 2]]) and torch.equal(flipped[:, 1], plain[:, 1])


def test_crops_of_torchvision_drop_boxes_with_their_labels_on_any_rank() -> None:
    alone = {(batch.step, batch.number): batch for batch in with_targets(Boxed(), DETECTION, "crop")}
    for rank in (0, 1):
        for batch in with_targets(Boxed(), DETECTION, "crop", rank=rank, ranks=2, workers=rank):
            same = alone[batch.step, batch.number]
            assert torch.equal(batch.inputs, same.inputs) and batch.targets["image_id"].shape == (2,)
            assert all(map(torch.equal, batch.targets["boxes"], same.targets["boxes"]))
            assert list(map(len, batch.targets["boxes"])) == list(map(len, batch.targets["labels"]))
    number = sum(len(boxes) for batch in alone.values() for boxes in batch.targets["boxes"])
    whole = train_with_targets(Boxed(), DETECTION, augment={})
    assert 0 < number < sum(len(boxes) for batch in whole for boxes in batch.targets["boxes"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no target", r"returned Image; return \(image, target\)"),
        ("no labels", r"returned a target without 'labels'; return all its parts"),
        ("crop and drop", r"returned \d+ rows of boxes, \d+ rows of labels; return one row per box"),
    ],
)
def test_other_targets_than_those_of_the_sample_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadFileError, match=rf"called for sample \d+, {message}"):
        with_targets(Boxed(), DETECTION, name)


JITTER = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}
THEIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "jitter": ({"color_jitter": JITTER}, v2.ColorJitter(**JITTER)),
    "randaugment": ({"randaugment": {"magnitude": 12}}, v2.RandAugment(magnitude=12)),
    "trivialaugment": ({"policy": "trivialaugment"}, v2.TrivialAugmentWide()),
    "autoaugment": ({"policy": "autoaugment"}, v2.AutoAugment()),
    "svhn": ({"policy": "autoaugment_svhn"}, v2.AutoAugment(AutoAugmentPolicy.SVHN)),
    "cifar10": ({"policy": "autoaugment_cifar10"}, v2.AutoAugment(AutoAugmentPolicy.CIFAR10)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", THEIRS)
def test_images_are_those_of_torchvision_under_the_seed_of_the_sample(name: str, channels: int) -> None:
    config, theirs = THEIRS[name]
    images, keys = random_images(24, channels), Keys(3, 1, torch.arange(24) + 7)
    batch = Photometric(AugmentConfig.model_validate(config))(images, keys)
    for image, expected, word in zip(batch, images, keys.words("photometric").tolist(), strict=True):
        seed_generators(word)
        assert torch.equal(image, theirs(expected))
    assert sum(not torch.equal(a, b) for a, b in zip(images, batch, strict=True)) > 12


def test_images_are_those_of_timm_under_the_seed_of_the_sample() -> None:
    images, keys = random_images(24), Keys(3, 1, torch.arange(24))
    theirs = rand_augment_transform("rand-m9-n3-mstd0.5-inc1", {})
    config = {"operations": "timm", "magnitude": 9, "magnitude_std": 0.5, "num_ops": 3}
    batch = Photometric(AugmentConfig.model_validate({"randaugment": config}))(images, keys)
    for image, expected, word in zip(batch, images, keys.words("photometric").tolist(), strict=True):
        seed_generators(word)
        pixels = np.array(theirs(Image.fromarray(expected.permute(1, 2, 0).numpy())))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
    gray = Photometric(AugmentConfig.model_validate({"randaugment": config}))(random_images(24, 1), keys)
    assert gray.shape == (24, 1, 12, 12)


@pytest.mark.parametrize("operations", ["torchvision", "timm"])
def test_randaugment_applies_operations_with_their_probability(operations: str) -> None:
    images, keys = random_images(200), Keys(0, 0, torch.arange(200))

    def changed(**config: Any) -> int:
        settings = AugmentConfig.model_validate({"randaugment": {"operations": operations, **config}})
        batch = Photometric(settings)(images, keys)
        return sum(not torch.equal(a, b) for a, b in zip(images, batch, strict=True))

    assert changed(probability=0.0) == 0
    assert 60 < changed(probability=0.5, num_ops=1) < changed(probability=1.0, num_ops=1) <= 200


def test_the_magnitude_of_randaugment_is_normally_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    magnitudes: list[int] = []

    class Recording:
        def __init__(self, num_ops: int, magnitude: int) -> None:
            self._magnitude = magnitude

        def __call__(self, image: Tensor) -> Tensor:
            magnitudes.append(self._magnitude)
            return image

    monkeypatch.setattr(v2, "RandAugment", Recording)
    images, keys = random_images(1).expand(2000, -1, -1, -1), Keys(0, 0, torch.arange(2000))
    for magnitude, std in ((15, 3.0), (29, 3.0)):
        config = {"num_ops": 1, "magnitude": magnitude, "magnitude_std": std}
        Photometric(AugmentConfig.model_validate({"randaugment": config}))(images, keys)
    drawn = torch.tensor(magnitudes).view(2, 2000).double()
    assert drawn[0].mean().item() == pytest.approx(15, abs=0.3)
    assert drawn[0].std().item() == pytest.approx(3, abs=0.2)
    assert drawn[1].max() == 30 and (drawn[1] == 30).sum() > (drawn[1] == 29).sum()


def test_each_sample_is_called_under_its_own_seed() -> None:
    keys = Keys(0, 1, torch.arange(6))
    drawn = seeded(lambda _: torch.rand(()).item(), range(6), keys, "a")
    alone = [
        seeded(lambda _: torch.rand(()).item(), [0], Keys(0, 1, torch.tensor([k])), "a") for k in range(6)
    ]
    assert [[number] for number in drawn] == alone and len(set(drawn)) == 6
    assert drawn != seeded(lambda _: torch.rand(()).item(), range(6), keys, "b")


def test_batches_of_several_inputs_are_refused() -> None:
    class Several:
        def __len__(self) -> int:
            return 20

        def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
            return {"a": random_images(len(indices)), "b": indices}, indices

    with pytest.raises(BadFileError, match=r"^data\.transform: transforms one sample at a time"):
        steps(Several(), transform=CAREFREE, augment={})
