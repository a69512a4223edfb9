"""Data sets named ``package.module:factory``, and what all sources have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.building import build_source
from tests.datasets import samples

HERE = "tests.datasets.test_building"
NO_FUNCTION = 3


class Listed(list[Any]):
    """A data set as people write them, with what tells its classes."""

    def __init__(self, items: Any, **attributes: Any) -> None:
        super().__init__(items)
        for name, value in attributes.items():
            setattr(self, name, value)


def gray(count: int, **attributes: Any) -> Listed:
    return Listed([(Image.new("L", (4, 4), i), i % 3) for i in range(count)], **attributes)


def pair(classes: int = 4, root: str = "none") -> Any:
    return gray(6, classes=[f"{root} {i}" for i in range(classes)]), gray(3)


def with_targets() -> Any:
    return gray(6, targets=[i % 3 for i in range(6)])


def floats() -> Any:
    return Listed([(torch.randn(5, 4, 4), 0)] * 3, num_classes=7), None


def nameless() -> Any:
    return gray(6)


def empty_val() -> Any:
    return gray(6, num_classes=3), []


def whole() -> DataSource:
    return samples.source(samples.random_split(9), samples.OneByOne(samples.random_split(3)))


def wrong() -> Any:
    return 3, 4


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        yield 0, 0


def returned(what: str) -> Any:
    """What people return who have not read the page on plug-ins."""
    image, split = Image.new("L", (4, 4)), gray(6, num_classes=3)
    return {
        "nothing": None,
        "three": (split, split, split),
        "named": {"train": split, "val": split},
        "bare": Listed([image] * 3, num_classes=3),
        "stream": Stream(),
        "keyed": Listed([{"image": image, "label": 0}] * 3, num_classes=3),
    }[what]


def failing() -> Any:
    raise TypeError("my own bug")


def build(name: str, root: str | None = None, **args: Any) -> DataSource:
    return build_source(DataConfig(name=f"{HERE}:{name}", root=root, args=args))


def test_a_factory_may_return_train_and_val() -> None:
    source = build("pair", classes=3, root="cats")
    assert source.info.class_names == ("cats 0", "cats 1", "cats 2")
    assert build("pair").info.class_names[0] == "none 0", "the file has no root"
    assert source.info.channels == 1
    assert source.val is not None
    image, target = source.val[2]
    assert isinstance(image, torch.Tensor)
    assert (image.tolist(), target) == ([[[2] * 4] * 4], 2)


def test_classes_are_counted_from_targets_where_there_are_no_names() -> None:
    source = build("with_targets")
    assert source.info.num_classes == 3
    assert source.val is None


def test_float_images_keep_their_values_and_channels() -> None:
    source = build("floats")
    image, _ = source.train[0]
    assert isinstance(image, torch.Tensor)
    assert image.dtype == torch.float32
    assert (source.info.channels, source.info.num_classes) == (5, 7)
    assert len(source.info.mean) == 5


def test_a_data_source_is_taken_as_it_is() -> None:
    source = build("whole")
    assert isinstance(source.train, TensorSplit)
    assert source.val is not None
    assert source.info.num_classes == 10


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("nameless", {}, r"^data: Listed .* the number of classes.* num_classes, classes .* targets"),
        ("empty_val", {}, r"^data: the validation data are empty"),
        ("wrong", {}, r"^data\.name: .*:wrong returned int; return a DataSource"),
        ("returned", {"what": "nothing"}, r"returned NoneType; return a DataSource, \(train, val\) or train"),
        ("returned", {"what": "three"}, r"returned tuple of 3; return a DataSource, \(train, val\) or train"),
        ("returned", {"what": "named"}, r"returned dict of 2; return a DataSource, \(train, val\) or train"),
        ("returned", {"what": "stream"}, r"returned Stream; return a DataSource, \(train, val\) or train"),
        ("returned", {"what": "bare"}, r"^data: __getitem__ returned a Image for a sample; return"),
        ("returned", {"what": "keyed"}, r"^data: __getitem__ returned a dict of 2 for a sample"),
        ("pair", {"clases": 3}, r"^data\.args: .*:pair can't be called with these arguments: .*'clases'"),
        ("unreadable", {}, r"^data\.name: Unreadable has neither __getitem__ nor batch"),
        ("NO_FUNCTION", {}, r"^data\.name: .* is int; name a function"),
        ("missing", {}, r"has no 'missing'"),
    ],
)
def test_what_can_not_be_used_is_refused(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        build(name, **args)


class Table:
    """Four features of each sample, read by ``batch`` alone."""

    num_classes = 3

    def __len__(self) -> int:
        return 6

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(len(indices), 4), indices % 3


class Unreadable:
    def __len__(self) -> int:
        return 6


def tables() -> Any:
    return Table(), Table()


def unreadable() -> DataSource:
    return samples.source(Unreadable())


def test_a_split_needs_nothing_but_batch() -> None:
    source = build("tables")
    assert isinstance(source.train, Table)
    assert (source.info.num_classes, source.info.channels) == (3, 4)


def test_a_type_error_inside_the_factory_is_not_called_a_wrong_argument() -> None:
    with pytest.raises(TypeError, match="my own bug"):
        build("failing")


def test_providers_are_found_by_name() -> None:
    assert build_source(DataConfig(name="digits")).info.num_classes == 10
    with pytest.raises(BadFileError, match="did you mean digits"):
        build_source(DataConfig(name="digit"))
