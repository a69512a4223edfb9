from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.sources.image_files import ImageFiles
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
from tests.datasets.samples import CPU, experiment

INFO = DataInfo(10, 3, (0.5,) * 3, (0.25,) * 3)
MASK = TargetSpec(
    "a class per pixel", "integer", (None, None), minimum=0, maximum=9, geometry="mask", ignored=255
)
DETECTION = {
    "boxes": TargetSpec("boxes", "float", (None, 4), is_ragged=True, geometry="boxes"),
    "labels": TargetSpec("labels", "integer", (None,), is_ragged=True, geometry="per box"),
    "image_id": TargetSpec("a number", "integer", ()),
}
AUGMENT = {"random_scale": [0.5, 2.0], "hflip": 0.5, "color_jitter": {"brightness": 0.3, "hue": 0.1}}


class Masked:
    """Images of differing sizes whose mask is their first channel modulo ten."""

    def __init__(self, count: int = 12, wrong: int | None = None) -> None:
        self._count = count
        self._wrong = wrong

    def __len__(self) -> int:
        return self._count

    def image(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 20 + index, 30 - index), dtype=torch.uint8, generator=generator)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        image = self.image(index)
        mask = image[0] % 10
        return image, mask[1:] if index == self._wrong else mask


class Boxed(Masked):
    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        boxes = torch.tensor([[0.0, 0.0, 5.0, 5.0]] * index + [[6.0, 6.0, 14.0, 18.0]])
        return self.image(index), {"boxes": boxes, "labels": torch.arange(len(boxes)), "image_id": index}


def train(
    split: Any, spec: Any, *, workers: int = 0, rank: int = 0, ranks: int = 1, **data: Any
) -> list[Batch]:
    keys: dict[str, Any] = {"augment": AUGMENT, "image_size": [16, 24], "workers": workers} | data
    config = experiment(global_batch_size=4, **keys)
    source = DataSource(split, None, INFO)
    with training_batches(source, config, Position(0), 3, rank, ranks, CPU, None, spec) as batches:
        return [batch for _, slots in batches for batch in slots]


def evaluate(split: Any, spec: Any, **data: Any) -> Iterator[Batch]:
    return iter(evaluation_batches(split, experiment(**data), 0, 1, CPU, None, spec))


def test_masks_of_any_size_become_batches_of_one_size() -> None:
    batches = train(Masked(), MASK)
    for batch in batches:
        assert batch.inputs.shape == (2, 3, 16, 24)
        assert batch.targets.shape == (2, 16, 24) and batch.targets.dtype == torch.uint8
        assert set(batch.targets.unique().tolist()) <= {*range(10), 255}
    assert not torch.equal(batches[0].inputs, batches[1].inputs)


def test_ranks_and_loader_processes_give_the_same_masks() -> None:
    alone = {(b.step, b.number): b for b in train(Masked(), MASK)}
    shared = [batch for rank in (0, 1) for batch in train(Masked(), MASK, rank=rank, ranks=2)]
    assert len(shared) == len(alone) == 6
    for batch in shared + train(Masked(), MASK, workers=1):
        same = alone[batch.step, batch.number]
        assert torch.equal(batch.inputs, same.inputs) and torch.equal(batch.targets, same.targets)


def test_repeats_of_a_mask_differ() -> None:
    first, second, *_ = train(Masked(), MASK, augment={**AUGMENT, "repeats": 2})  # the same two samples
    assert not any(torch.equal(a, b) for a, b in zip(first.targets, second.targets, strict=True))


def test_evaluation_fits_and_pads_without_randomness() -> None:
    first, *_ = evaluate(Masked(), MASK, augment=AUGMENT, image_size=[16, 24], eval_size=[40, 40])
    assert first.inputs.shape == (2, 3, 40, 40)
    assert (first.targets[0] == 255).sum() == 40 * 40 - 27 * 40  # 20 x 30 fits as 27 x 40
    (alone, *_) = evaluate(Masked(1), MASK, augment=AUGMENT)
    assert torch.equal(alone.inputs[0], Masked().image(0))
    assert torch.equal(alone.targets[0], Masked()[0][1])


@pytest.mark.parametrize("spec", [MASK, DETECTION])
def test_images_without_targets_are_resized_as_those_with_masks_or_boxes(spec: Any, tmp_path: Path) -> None:
    for index in range(4):
        Image.fromarray(Masked().image(index).permute(1, 2, 0).numpy()).save(tmp_path / f"{index}.png")
    config = experiment(image_size=[16, 24])
    found = evaluation_batches(ImageFiles(tmp_path, 3), config, 0, 1, CPU, None, spec, has_targets=False)
    for batch, expected in zip(found, evaluate(Masked(4), MASK, image_size=[16, 24]), strict=True):
        assert torch.equal(batch.inputs, expected.inputs)


def test_masks_in_memory_are_moved_like_those_of_single_samples() -> None:
    images = torch.randint(0, 256, (8, 3, 20, 30), dtype=torch.uint8)
    split = TensorSplit(images, images[:, 0] % 10)
    for batch in train(split, MASK, augment={"hflip": 0.5}, image_size=None):
        assert torch.equal(batch.inputs[:, 0] % 10, batch.targets)


def test_boxes_keep_their_labels() -> None:
    for batch in train(Boxed(), DETECTION):
        assert isinstance(batch.targets["boxes"], list) and batch.targets["image_id"].shape == (2,)
        for boxes, labels in zip(batch.targets["boxes"], batch.targets["labels"], strict=True):
            assert len(boxes) == len(labels)
            assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()
            assert (boxes >= 0).all() and (boxes[:, [0, 2]] <= 24).all() and (boxes[:, [1, 3]] <= 16).all()
    number = sum(len(each) for b in train(Boxed(), DETECTION) for each in b.targets["boxes"])
    everything = sum(len(each) for b in train(Boxed(), DETECTION, augment={}) for each in b.targets["boxes"])
    assert 0 < number < everything  # random crops drop some, a whole image none
    first, *_ = evaluate(Boxed(), DETECTION, image_size=10)
    assert [len(each) for each in first.targets["boxes"]] == [1, 2]


def test_a_mask_of_another_size_names_its_sample() -> None:
    with pytest.raises(BadFileError, match=r"sample 7 .*target of 26x23 .* image has 27x23; make both"):
        train(Masked(wrong=7), MASK)


def test_a_class_beyond_the_bounds_is_refused_but_not_the_ignored_one() -> None:
    images = torch.full((8, 3, 4, 4), 255, dtype=torch.uint8)
    assert train(TensorSplit(images, images[:, 0]), MASK, augment={}, image_size=None)
    with pytest.raises(BadFileError, match=r"values 250 to 250.*at most 9, or 255 to ignore"):
        train(TensorSplit(images, torch.full_like(images[:, 0], 250)), MASK, augment={}, image_size=None)


def test_the_crop_has_an_interpolation_of_its_own() -> None:
    def inputs(interpolation: str | None) -> list[Tensor]:
        crop = {"scale": [0.2, 0.5], "interpolation": interpolation}
        return [batch.inputs for batch in train(Masked(), MASK, augment={"random_resized_crop": crop})]

    bilinear, bicubic, mixed = inputs("bilinear"), inputs("bicubic"), inputs("random")
    assert all(map(torch.equal, bilinear, inputs(None)))
    choices = [
        (torch.equal(one, other), torch.equal(one, another))
        for one, other, another in zip(torch.cat(mixed), torch.cat(bilinear), torch.cat(bicubic), strict=True)
    ]
    assert set(choices) == {(True, False), (False, True)}


@pytest.mark.parametrize(
    ("key", "value"), [("crop_padding", 2), ("randaugment", {}), ("policy", "trivialaugment")]
)
def test_augmentation_that_masks_can_not_follow_is_refused(key: str, value: Any) -> None:
    with pytest.raises(BadFileError, match=rf"data\.augment\.{key}: moves .* write random_scale"):
        train(Masked(), MASK, augment={key: value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"augment": {"random_scale": [0.5, 2.0]}}, r"data\.augment\.random_scale: is for images with masks"),
        ({"eval_size": 8}, r"data\.eval_size: is for images with masks"),
        ({"image_size": [8, 16]}, r"data\.image_size: 8x16 is for images with masks .* write 8"),
    ],
)
def test_keys_of_masks_are_refused_for_other_targets(keys: dict[str, Any], message: str) -> None:
    images = torch.zeros(8, 3, 16, 24, dtype=torch.uint8)
    with pytest.raises(BadFileError, match=message):
        train(TensorSplit(images, torch.arange(8)), None, **({"augment": {}, "image_size": None} | keys))
