"""Targets reach the task in the dtype and shape that the data set gives them, or are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.sources.torchvision import in_memory
from hpc_train.training.datasets.types import TargetSpec
from tests.datasets.samples import CPU, experiment, random_images, source

CLASS = TargetSpec("a class number", kind="integer", shape=(), minimum=0, maximum=9)
SAMPLES = 8


class Samples:
    """Eight images of 4x4 pixels with the given targets, sample by sample."""

    def __init__(self, targets: Any, inputs: Any = None) -> None:
        self._targets = targets
        self._inputs = random_images(SAMPLES, height=4, width=4) if inputs is None else inputs

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        return self._inputs[index], self._targets[index]


class Table:
    """The same as a whole batch, and by nothing else."""

    def __init__(self, targets: Tensor, inputs: Tensor | None = None) -> None:
        self._targets = targets
        self._inputs = random_images(SAMPLES, height=4, width=4) if inputs is None else inputs

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._inputs[indices], self._targets[indices]


def read(train: Any, spec: TargetSpec | None = None, **data: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one epoch as training reads them."""
    config = experiment(micro_batch_size=8, **data)
    with training_batches(source(train), config, Position(0), 1, 0, 1, CPU, target_spec=spec) as batches:
        ((_, (batch,)),) = batches
    return batch.inputs, batch.targets


MASK = torch.arange(16, dtype=torch.uint8).view(4, 4)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.37, torch.tensor(0.37)),
        (3, torch.tensor(3)),
        (True, torch.tensor(True)),
        (np.float64(0.37), torch.tensor(0.37, dtype=torch.float64)),
        (np.uint8(200), torch.tensor(200, dtype=torch.uint8)),
        (np.bool_(True), torch.tensor(True)),
        ([0.25, 0.5], torch.tensor([0.25, 0.5])),
        (torch.tensor([1.5], dtype=torch.float16), torch.tensor([1.5], dtype=torch.float16)),
        (np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1], torch.tensor([[2, 1, 0], [5, 4, 3]]).short()),
        (MASK, MASK),
        (Image.fromarray(MASK.numpy()), MASK),
    ],
    ids=lambda value: type(value).__name__,
)
def test_targets_keep_dtype_and_shape(target: Any, expected: Tensor) -> None:
    given = Samples([target] * SAMPLES)
    (evaluated,) = evaluation_batches(given, experiment(micro_batch_size=8), 0, 1, CPU)
    for targets in (read(given)[1], evaluated.targets):
        assert targets.dtype == expected.dtype
        assert torch.equal(targets, expected.expand(SAMPLES, *expected.shape))


def test_a_whole_batch_keeps_dtype_and_shape() -> None:
    for targets in (torch.rand(SAMPLES), torch.rand(SAMPLES, 4, 4).double(), torch.arange(SAMPLES).short()):
        split = TensorSplit(random_images(SAMPLES), targets)
        assert read(split)[1].dtype == targets.dtype
        assert read(split)[1].shape == targets.shape
        assert torch.equal(torch.as_tensor(split[3][1]), targets[3])


@pytest.mark.parametrize("integer", [torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool])
def test_class_numbers_of_any_integer_dtype_become_int64(integer: torch.dtype) -> None:
    targets = (torch.arange(SAMPLES) % 2).to(integer)
    for split in (Samples(targets), Table(targets)):
        found = read(split, CLASS)[1]
        assert found.dtype == torch.int64
        assert sorted(found.tolist()) == [0] * 4 + [1] * 4


def others(target: Any, dtype: torch.dtype = torch.int64) -> list[Any]:
    """Return class numbers of which only sample 5's is ``target``."""
    return [target if index == 5 else torch.tensor(0, dtype=dtype) for index in range(SAMPLES)]


NEEDS = (
    r"and task classification needs a class number \(integers of shape \(\), at least 0, at most 9\); fix "
)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("target", "found"),
    [
        (0.37, r"0\.37\d* \(float32 of shape \(\)\)"),
        (3.0, r"3\.0 \(float32 of shape \(\)\)"),
        (10, r"10 \(int64 of shape \(\)\)"),
        (-1, r"-1 \(int64 of shape \(\)\)"),
        (np.array([3]), r"of int64, shape \(1,\), values 3 to 3"),
        (MASK, r"of uint8, shape \(4, 4\), values 0 to 15"),
        ("cat", r"'cat' \(str\)"),
        (None, r"None \(NoneType\)"),
        ({"boxes": 1}, "a dict with boxes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_sample_that_does_not_fit_the_task_is_named(target: Any, found: str, workers: int) -> None:
    with pytest.raises(BadFileError, match=f"^data: sample 5 has the target {found}, {NEEDS}"):
        read(Samples(others(target)), CLASS, workers=workers)


@pytest.mark.parametrize("value", [10, -1])
def test_a_sample_of_a_whole_batch_that_does_not_fit_the_task_is_named(value: int) -> None:
    targets = torch.zeros(SAMPLES, dtype=torch.int64)
    targets[5] = value
    with pytest.raises(BadFileError, match=rf"^data: sample 5 has the target {value} .*{NEEDS}"):
        read(Table(targets), CLASS)
    with pytest.raises(BadFileError, match=r"^data: validation sample 5 has"):
        list(evaluation_batches(Table(targets), experiment(), 0, 1, CPU, target_spec=CLASS))


def test_bounds_of_float_targets_refuse_nan() -> None:
    spec = TargetSpec("an age", kind="float", shape=(), minimum=0)
    assert read(Samples(torch.rand(SAMPLES).double()), spec)[1].dtype == torch.float64
    with pytest.raises(BadFileError, match=r"^data: sample 5 has the target nan .* an age \(floating-point"):
        read(Samples(others(float("nan"), torch.float32)), spec)


def test_any_size_is_none_in_a_shape() -> None:
    spec = TargetSpec("a mask", kind="integer", shape=(None, None), maximum=20)
    assert read(Samples([MASK] * SAMPLES), spec)[1].shape == (SAMPLES, 4, 4)
    with pytest.raises(BadFileError, match=r"a mask \(integers of shape \(any, any\), at most 20\)"):
        read(Samples([3] * SAMPLES), spec)


@pytest.mark.parametrize("other", [0.5, [1, 2]])
def test_targets_that_differ_in_dtype_or_shape_are_refused_with_both_samples(other: Any) -> None:
    with pytest.raises(BadFileError, match=r"^data: sample \d has .*, and sample \d .*; return targets"):
        read(Samples(others(other)))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"augment": {"hflip": 0.5}}, "data.augment.hflip"),
        ({"augment": {"crop_padding": 1}}, "data.augment.crop_padding"),
        ({"image_size": 3}, "data.image_size"),
        ({"image_size": 4, "eval_crop": 0.5}, "data.image_size"),
    ],
)
def test_masks_are_refused_where_only_their_images_would_move(data: dict[str, Any], key: str) -> None:
    masks = Samples([MASK] * SAMPLES)
    with pytest.raises(BadFileError, match=rf"^{key}: moves the pixels of the image, but not .* 4x4 target"):
        read(masks, **data)


def test_masks_are_read_where_nothing_moves() -> None:
    assert read(Samples([MASK] * SAMPLES), image_size=4, augment={"erasing": 0.5})[1].shape == (SAMPLES, 4, 4)


@pytest.mark.parametrize("kind", [Samples, Table])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_features_are_inputs(kind: Any, dtype: torch.dtype) -> None:
    features = torch.rand(SAMPLES, 8, dtype=dtype)
    inputs, _ = read(kind(torch.arange(SAMPLES), features))
    assert inputs.dtype == dtype
    assert torch.equal(inputs.sort(dim=0).values, features.sort(dim=0).values)


@pytest.mark.parametrize("data", [{"image_size": 4}, {"augment": AugmentConfig(hflip=0.5)}])
def test_rows_of_features_are_not_resized_or_augmented(data: dict[str, Any]) -> None:
    with pytest.raises(BadFileError, match=rf"^data\.{next(iter(data))}: is for images, .* shape \(8,\)"):
        read(Samples(torch.arange(SAMPLES), torch.rand(SAMPLES, 8)), **data)


def test_rows_of_features_have_one_length() -> None:
    rows = [torch.rand(8 + (index == 5)) for index in range(SAMPLES)]
    with pytest.raises(BadFileError, match=r"^data: rows of features differ in length \(8 and 9\)"):
        read(Samples(torch.arange(SAMPLES), rows))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(8, 3, 4, 4), r"Wrong\.batch must return \(inputs, targets\), tensors of 8 samples"),
        (([0] * 8, torch.zeros(8)), r"Wrong\.batch must return"),
        ((torch.zeros(8, 3, 4, 4), torch.zeros(())), r"Wrong\.batch must return"),
        ((torch.zeros(7, 3, 4, 4), torch.zeros(8)), r"Wrong\.batch must return"),
        ((torch.zeros(8, 4, dtype=torch.int32), torch.zeros(8)), r"inputs of .*int32 and shape \(8, 4\)"),
        ((torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.zeros(8)), r"1 channels, .* channels=3"),
    ],
)
def test_a_batch_that_is_not_one_is_refused(batch: Any, words: str) -> None:
    class Wrong(Table):
        def batch(self, indices: Tensor) -> Any:
            return batch

    with pytest.raises(BadFileError, match=rf"^data\.name: .*{words}"):
        read(Wrong(torch.arange(SAMPLES)))


def test_a_transform_of_targets_is_not_undone_by_reading_from_memory() -> None:
    class Aged:
        data = random_images(SAMPLES)
        targets = [0] * SAMPLES

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, float]:
            return self.data[index], 0.37

    assert isinstance(in_memory(Aged()), Aged)
