"""Dicts, tuples and ragged lists go through the loader, bad samples and evaluation like single tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.training.datasets.batches import evaluation_batches, training_batches, try_samples
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.skipping import BadSamples
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec, TargetSpecs, map_tensors
from tests.datasets.samples import CPU, experiment, random_images, source

SAMPLES = 8
SIDE = 4
BOXES: dict[str, TargetSpec] = {
    "boxes": TargetSpec("corners of boxes", kind="float", shape=(None, 4), is_ragged=True),
    "labels": TargetSpec(
        "class numbers", kind="integer", shape=(None,), minimum=0, maximum=9, is_ragged=True
    ),
}
IMAGES = random_images(SAMPLES, height=SIDE, width=SIDE)
MASKS = torch.arange(SAMPLES * SIDE * SIDE).view(SAMPLES, SIDE, SIDE) % 10


def boxes(index: int) -> Tensor:
    """As many as the sample's number; sample 0 has none."""
    return torch.arange(index * 4, dtype=torch.float32).view(index, 4)


class Dicts:
    """An image and a row of features, with a mask and a class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        inputs = {"image": IMAGES[index], "age": torch.tensor([index / 10])}
        return inputs, {"mask": MASKS[index].numpy().astype(np.uint8), "of": (index, torch.ones(2))}


class DictTable(Dicts):
    """The same in whole batches."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        raise AssertionError("read as whole batches")

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        inputs = {"image": IMAGES[indices], "age": indices[:, None] / 10}
        of = (indices, torch.ones(len(indices), 2))
        return inputs, {"mask": MASKS[indices].to(torch.uint8), "of": of}


class Boxes:
    """One image each; sample ``bad`` can't be read, and sample ``wrong`` has a class that there is not."""

    def __init__(self, bad: int | None = None, wrong: int | None = None) -> None:
        self.bad = bad
        self.wrong = wrong

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        if index == self.bad:
            raise ValueError("truncated")
        labels = torch.full((index,), 10 if index == self.wrong else 1)
        return IMAGES[index], {"boxes": boxes(index), "labels": labels, "id": index}


class BoxTable(Boxes):
    """The same in whole batches."""

    def batch(self, indices: Tensor) -> tuple[Tensor, Any]:
        samples = [self[index][1] for index in indices.tolist()]
        targets = {name: [sample[name] for sample in samples] for name in ("boxes", "labels")}
        return IMAGES[indices], targets | {"id": indices}


def read(train: Any, spec: TargetSpecs = None, bad: BadSamples | None = None, **data: Any) -> Batch:
    """Return one epoch in one micro-batch, as training reads it."""
    config = experiment(micro_batch_size=8, **data)
    with training_batches(source(train), config, Position(0), 1, 0, 1, CPU, bad, spec) as batches:
        ((_, (batch,)),) = batches
    return batch


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", [Dicts(), DictTable()], ids=["one by one", "whole batches"])
def test_dicts_and_tuples_keep_their_structure(split: Any, workers: int) -> None:
    batch = read(split, workers=workers)
    order = batch.targets["of"][0]
    assert sorted(order.tolist()) == list(range(SAMPLES))
    assert torch.equal(batch.inputs["image"], IMAGES[order])
    torch.testing.assert_close(batch.inputs["age"], order[:, None] / 10)
    assert torch.equal(batch.targets["mask"], MASKS[order].to(torch.uint8))
    assert torch.equal(batch.targets["of"][1], torch.ones(SAMPLES, 2))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", [Boxes(), BoxTable()], ids=["one by one", "whole batches"])
def test_targets_that_differ_in_shape_are_lists_of_one_tensor_per_sample(split: Any, workers: int) -> None:
    batch = read(split, BOXES, workers=workers)
    order = batch.targets["id"].tolist()
    assert torch.equal(batch.inputs, IMAGES[order])
    for index, found, labels in zip(order, batch.targets["boxes"], batch.targets["labels"], strict=True):
        assert torch.equal(found, boxes(index)) and found.dtype == torch.float32
        assert torch.equal(labels, torch.ones(index, dtype=torch.int64))


def test_without_is_ragged_targets_of_several_shapes_are_refused_by_name() -> None:
    with pytest.raises(BadFileError, match=r"sample \d has the target 'boxes' of .* targets of the same"):
        read(Boxes())


def test_a_bad_sample_of_a_dict_batch_is_replaced(tmp_path: Path) -> None:
    bad = BadSamples(RunPaths(tmp_path), 1, 0)
    RunPaths(tmp_path).attempt(1).folder.mkdir(parents=True)
    for split in (Boxes(bad=3), Boxes(wrong=3)):
        batch = read(split, BOXES, bad, on_bad_sample="skip")
        ids = batch.targets["id"].tolist()
        assert len(ids) == SAMPLES and 3 not in ids
        assert [len(each) for each in batch.targets["boxes"]] == ids
    assert bad.count == 1, "both times the same sample"
    (evaluated,) = evaluation_batches(Boxes(bad=3), experiment(micro_batch_size=8), 0, 1, CPU, bad, BOXES)
    assert evaluated.valid.tolist() == [index != 3 for index in range(SAMPLES)]


@pytest.mark.parametrize(
    ("split", "spec", "words"),
    [
        (Boxes(wrong=3), BOXES, r"sample 3 has the target 'labels' .* values 10 to 10, .* at most 9"),
        (BoxTable(wrong=3), BOXES, r"sample 3 has the target 'labels' .* values 10 to 10, and task"),
        (Boxes(), {"masks": BOXES["boxes"]}, r"a dict with boxes, labels, id, and task .* needs a dict"),
        (Boxes(), BOXES["labels"], r"a dict with boxes, labels, id, and task .* needs class numbers"),
        (BoxTable(), TargetSpec("a class"), r"the target a dict with boxes, labels, id, and task"),
    ],
)
def test_what_the_task_does_not_take_is_named(split: Any, spec: TargetSpecs, words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        read(split, spec)


def test_samples_of_one_structure_each_are_refused() -> None:
    class Mixed(Dicts):
        def __getitem__(self, index: int, /) -> tuple[Any, Any]:
            return IMAGES[index], {"a": 1} if index else {"b": 1}

    with pytest.raises(BadFileError, match=r"samples of one batch have the parts [ab] and the parts [ab]; "):
        read(Mixed())


@pytest.mark.parametrize(
    ("split", "data", "words"),
    [
        (Dicts(), {"augment": {"hflip": 0.5}}, r"data\.augment: is for images, and .* have several inputs"),
        (DictTable(), {"image_size": 8}, r"data\.image_size: is for images, and samples have several inputs"),
        (Boxes(), {"augment": {"hflip": 0.5}}, r"data\.augment\.hflip: moves .* pixels .* shape \(\d, 4\)"),
    ],
)
def test_images_are_not_moved_where_the_rest_of_the_sample_would_stay(
    split: Any, data: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadFileError, match=words):
        read(split, BOXES if isinstance(split, Boxes) else None, **data)


def test_pixels_may_change_where_they_stay_in_their_place() -> None:
    assert len(read(Boxes(), BOXES, augment={"erasing": 0.5}).targets["boxes"]) == SAMPLES


def test_prepare_tries_structures_too() -> None:
    (batch, *_), bad = try_samples(source(Dicts(), Dicts()), experiment(), None)
    assert bad == [] and len(batch.inputs["image"]) == SAMPLES


def test_images_of_a_structure_may_be_pil_or_arrays() -> None:
    class Pictures(Dicts):
        def __getitem__(self, index: int, /) -> tuple[Any, Any]:
            pixels = IMAGES[index].permute(1, 2, 0).numpy()
            return (Image.fromarray(pixels), pixels[:, ::-1], 0.5), index

    batch = read(Pictures())
    assert torch.equal(batch.inputs[0], IMAGES[batch.targets])
    assert torch.equal(batch.inputs[1], IMAGES[batch.targets].flip(-1))
    assert torch.equal(batch.inputs[2], torch.full((SAMPLES,), 0.5))


def test_only_images_of_a_structure_are_normalised() -> None:
    normalize = Normalize(DataInfo(10, 3, (0.5,) * 3, (0.25,) * 3), experiment().data)
    inputs = {"image": IMAGES, "age": torch.rand(SAMPLES, 1).double(), "tokens": torch.arange(SAMPLES)}
    found = normalize(inputs)
    torch.testing.assert_close(found["image"], (IMAGES / 255 - 0.5) / 0.25)
    assert found["age"].dtype == torch.float32 and found["tokens"] is inputs["tokens"]
    with pytest.raises(BadFileError, match="images have 1 channels"):
        normalize({"depth": IMAGES[:, :1]})


def test_a_batch_is_repeated_and_moved_as_a_whole() -> None:
    batch = read(Boxes(), BOXES)
    twice = batch.repeated(2)
    ids = [index for index in batch.targets["id"].tolist() for _ in range(2)]
    assert twice.targets["id"].tolist() == ids
    assert [len(each) for each in twice.targets["boxes"]] == ids
    assert len(twice.inputs) == len(twice.valid) == 2 * SAMPLES
    moved = batch.to(torch.device("meta"))
    assert all(each.is_meta for each in (moved.inputs, moved.targets["id"], *moved.targets["boxes"]))


def test_structures_are_kept() -> None:
    given = {"a": (torch.ones(2), None), "b": [torch.zeros(1), torch.zeros(3)]}
    found = map_tensors(lambda tensor: tensor + 1, given)
    assert torch.equal(found["a"][0], torch.full((2,), 2.0)) and found["a"][1] is None
    assert [len(each) for each in found["b"]] == [1, 3]
