"""A model that names its split points is cut there and nowhere else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.splitting import Stage, split_model


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class _Net(nn.Module):
    """A stem, groups of blocks that get wider, a head."""

    points: Any = ("groups.1", "head")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.groups = nn.ModuleList(nn.Sequential(*(_Block(w) for _ in range(2))) for w in (4, 8, 64))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for group in self.groups:
            x = group(x)
        return self.head(x)

    def split_points(self) -> Any:
        return self.points


def _net(*points: str) -> _Net:
    return _saying(points)


def _saying(points: Any) -> _Net:
    torch.manual_seed(0)
    return type("_Own", (_Net,), {"points": points})()


def _split(model: nn.Module, num_stages: int) -> list[Stage]:
    return split_model(model, find_blocks(model), num_stages)


def _first_names(stages: list[Stage]) -> list[str]:
    return [next(iter(stage.state_dict())).removesuffix(".weight") for stage in stages]


def test_it_is_cut_right_before_what_is_named() -> None:
    model = _net("groups.0.1", "head")
    stages = _split(model, 3)
    # The head holds no block: that it is a stage of its own is the model's word.
    assert _first_names(stages) == ["stem", "groups.0.1.up", "head"]
    x = torch.randn(3, 4)
    value = x
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(x))


def test_of_more_points_those_are_taken_that_balance_best() -> None:
    model = _net("groups.0", "groups.1", "groups.2")
    assert _first_names(_split(model, 2)) == ["stem", "groups.2.0.up"]
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in _split(model, 3)]
    assert [later > earlier for earlier, later in pairwise(sizes)] == [True, True]


@pytest.mark.parametrize(
    ("points", "num_stages", "words"),
    [
        (("groups.1", "tail"), 2, "model.name: .*names tail, .*; name submodules"),
        (("groups.1", "head"), 4, "parallel.pipeline: 4 stages .* has 3; write at most 3"),
        (("stem",), 2, "parallel.pipeline: 2 stages .* has 1; write another"),
    ],
)
def test_points_that_do_not_do_are_refused(points: tuple[str, ...], num_stages: int, words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        _split(_net(*points), num_stages)


@pytest.mark.parametrize(
    ("said", "what"),
    [(None, "None"), ("groups.1", "a str"), ([nn.Linear(4, 4)], "a list with a Linear in it")],
)
def test_what_is_not_a_list_of_names_is_refused(said: Any, what: str) -> None:
    words = rf"^model\.name: split_points\(\) returned {what}; write a list of names, like \['layers\.2'\]$"
    with pytest.raises(BadFileError, match=words):
        _split(_saying(said), 2)


class _Padded(nn.Module):
    """Layers without parameters first, in the midst and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.ReLU(), nn.ReLU()
        self.one, self.between, self.two = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.between(self.one(self.first(x)))))

    def split_points(self) -> list[str]:
        return ["first", "one", "between", "two", "last"]


def test_points_that_leave_a_stage_nothing_to_train_do_not_count() -> None:
    assert [list(stage.state_dict()) for stage in _split(_Padded(), 2)] == [
        ["one.weight", "one.bias"],
        ["two.weight", "two.bias"],
    ]
    with pytest.raises(BadFileError, match=r"3 stages .* has 2; write at most 2"):
        _split(_Padded(), 3)
