"""``hpc-train prepare`` reads samples as ranks do, so that what it accepts trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.training.prepare import prepare

HERE = "tests.training.test_prepare"


class Samples:
    """Forty samples with the shape of input and the target that the file asks for; ``odd`` is sample 39's."""

    num_classes = 3

    def __init__(self, shape: Sequence[int], target: Any = 0, odd: Any = None) -> None:
        self._inputs = torch.rand(40, *shape)
        self._targets = [target] * 39 + [target if odd is None else odd]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        return self._inputs[index], self._targets[index]


def images(target: Any = 0, odd: Any = None) -> Any:
    return Samples((1, 4, 4), target, odd), None


def features(dims: int = 1) -> DataSource:
    return DataSource(Samples((8,) * dims), Samples((8,) * dims), DataInfo(3, 8, (0.5,) * 8, (0.5,) * 8))


def validation(target: Any) -> Any:
    return Samples((1, 4, 4)), Samples((1, 4, 4), target)


def without_statistics() -> DataSource:
    return DataSource(Samples((1, 4, 4)), None, DataInfo(3, 1, (), ()))


def experiment(factory: str, args: dict[str, Any], **keys: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "test",
            "task": "classification",
            "model": {"name": "tests.models.factories:mlp"},
            "data": {"name": f"{HERE}:{factory}", "args": args, **keys.pop("data", {})},
            "optimization": {
                "steps": 1,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "optimizer": {"name": "sgd", "lr": 0.1},
                **keys.pop("optimization", {}),
            },
        }
    )


@pytest.mark.parametrize(
    ("factory", "args", "keys", "words"),
    [
        ("images", {"target": 0.37}, {}, r"^data: sample 0 has the target 0\.37\d* .*task classification"),
        ("images", {"odd": 3}, {}, r"^data: sample 39 has the target 3 .*at most 2\); fix"),
        ("validation", {"target": 0.37}, {}, r"^data: validation sample 0 has the target 0\.37"),
        ("features", {"dims": 4}, {}, r"^data: sample 0 can't be read: .* of shape \(8, 8, 8, 8\)"),
        ("features", {}, {"data": {"image_size": 4}}, r"^data\.image_size: is for images"),
        ("without_statistics", {}, {}, r"^data\.normalize\.mean: \[\] has 0 values"),
        ("images", {}, {"optimization": {"global_batch_size": 48}}, r"global_batch_size: 48 is more"),
    ],
)
def test_prepare_refuses_what_ranks_would_refuse(
    factory: str, args: dict[str, Any], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadFileError, match=words):
        prepare([experiment(factory, args, **keys)])


def test_prepare_accepts_rows_of_features(capsys: pytest.CaptureFixture[str]) -> None:
    prepare([experiment("features", {})])
    assert "40 training and 40 validation samples, 3 classes" in capsys.readouterr().err


def test_prepare_names_samples_that_would_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    prepare([experiment("images", {"odd": 0.37}, data={"on_bad_sample": "skip"})])
    said = capsys.readouterr().err
    assert "data: can't be used, another sample will replace it: sample 39: it has the target 0.37" in said
