"""What a data set without information of its own is found to have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.images import as_tensor
from hpc_train.training.datasets.sources.infer import count_channels, infer_info

IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)


class Samples:
    def __init__(self, target: Any) -> None:
        self._target = target

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, Any]:
        return IMAGE, self._target


class Named(Samples):
    classes = ("a", "b", "c")


class Whole(Samples):
    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return IMAGE.repeat(len(indices), 1, 1, 1), torch.as_tensor(self._target).repeat(len(indices), 1)


@pytest.mark.parametrize(
    ("split", "num_classes", "shape"),
    [
        (Named(2), 3, ()),
        (Named([0, 1, 1]), 3, (3,)),
        (Samples([0.5, 0.5, 0.0, 0.0]), 4, (4,)),
        (Samples(0.5), 1, ()),
        (Whole([1.0, 2.0]), 2, (2,)),
        (Named(torch.zeros(4, 4)), 3, ()),
        (Named({"boxes": [1.0]}), 3, ()),
        (Named("no target"), 3, ()),
    ],
)
def test_the_shape_of_targets_is_the_firsts(split: Any, num_classes: int, shape: tuple[int, ...]) -> None:
    info = infer_info("own", split, None)
    assert (info.num_classes, info.target_shape) == (num_classes, shape)


@pytest.mark.parametrize(
    ("image", "channels"),
    [
        (torch.zeros(3, 8, 9), 3),
        (torch.zeros(200, 4, 4), 200),
        (torch.zeros(12, 1, 50), 12),
        (torch.zeros(8, 9, 3), None),
        (np.zeros((3, 9, 8), np.uint8), None),
        (np.zeros((1, 8, 8), np.float32), None),
        (np.zeros((9, 8, 3), np.uint8), 3),
    ],
)
def test_channels_in_another_place_are_an_error(image: Any, channels: int | None) -> None:
    class Images(Samples):
        def __getitem__(self, index: int, /) -> tuple[Any, Any]:
            return image, 0

    class Batches(Images):
        def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return as_tensor(image).repeat(len(indices), 1, 1, 1), torch.zeros(
                len(indices), dtype=torch.int64
            )

    for split in (Images(0), Batches(0)):
        if channels is None:
            with pytest.raises(
                BadFileError, match=r"the first image has \d channels .*; return tensors of \(C, H"
            ):
                count_channels(split)
        else:
            assert count_channels(split) == channels


def test_other_classes_of_the_validation_data_are_an_error() -> None:
    class Reordered(Samples):
        classes = ("a", "c", "b")

    with pytest.raises(BadFileError, match=r"class 1 is 'b' in the training data and 'c' in the validation"):
        infer_info("own", Named(0), Reordered(0))
    assert infer_info("own", Named(0), Named(0)).class_names == Named.classes


def test_a_class_that_only_the_validation_data_have_is_an_error() -> None:
    class Counted(Samples):
        def __init__(self, *targets: int) -> None:
            super().__init__(targets[0])
            self.targets = targets

    assert infer_info("own", Counted(0, 1), Counted(0, 0)).num_classes == 2
    with pytest.raises(BadFileError, match=r"validation data have the class 5, and the largest .* is 1; fix"):
        infer_info("own", Counted(0, 1), Counted(0, 5))
