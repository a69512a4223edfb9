"""The best evaluation so far, by the rows of evaluations."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from hpc_train.run.best import Best, BestSoFar
from hpc_train.run.file_shapes import decoded, encoded

VALUES = [0.5, 0.7, 0.7, None, 0.75, 0.6]


def after(values: list[Any], mode: Literal["min", "max"], min_delta: float = 0.0) -> BestSoFar:
    followed = BestSoFar("accuracy", mode, min_delta)
    for place, value in enumerate(values):
        followed.add_row({"split": "val", "step": 10 * (place + 1), "accuracy": value})
    return followed


@pytest.mark.parametrize(
    ("mode", "min_delta", "step", "num_worse"),
    [("max", 0.0, 50, 1), ("max", 0.1, 20, 4), ("min", 0.0, 10, 5)],
)
def test_first_best_counts(mode: Literal["min", "max"], min_delta: float, step: int, num_worse: int) -> None:
    followed = after(VALUES, mode, min_delta)
    assert followed.best == Best("accuracy", VALUES[step // 10 - 1] or 0, step)
    assert followed.num_worse == num_worse


@pytest.mark.parametrize(("mode", "value"), [("max", 0.75), ("min", 0.25)])
def test_a_gain_of_exactly_min_delta_is_no_improvement(mode: Literal["min", "max"], value: float) -> None:
    followed = after([0.5, value], mode, min_delta=0.25)
    assert followed.best == Best("accuracy", 0.5, 10) and followed.num_worse == 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), True, "0.9", 10**400])
def test_what_is_no_finite_number_is_an_evaluation_without_improvement(value: Any) -> None:
    followed = after([0.5, value], "max")
    assert followed.best == Best("accuracy", 0.5, 10) and followed.num_worse == 1


def test_rows_without_the_metric_change_nothing() -> None:
    followed = after([0.5], "max")
    followed.add_row({"split": "val", "step": 20, "loss": 1.0})
    assert followed.num_worse == 0


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"metric": 1, "value": 0.5, "step": 1}, {"metric": "a", "value": "x", "step": 1},
     {"metric": "a", "value": 0.5, "step": -1}, {"metric": "a", "value": 0.5, "step": True}],
)  # fmt: skip
def test_a_manifest_that_somebody_else_wrote_names_none(data: object) -> None:
    assert decoded(Best, data) is None


def test_the_best_comes_back_as_it_was_written() -> None:
    best = Best("ema_accuracy", 1 / 3, 40)
    assert decoded(Best, encoded(best)) == best
    assert str(best) == "ema_accuracy 0.333333 at step 40"
