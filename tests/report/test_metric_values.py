"""What is known of a metric by its name."""

from __future__ import annotations

import pytest

from hpc_train.report.metrics_reader import Metric, find_metric


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("loss", "min"),
        ("ema_loss", "min"),
        ("rmse", "min"),
        ("accuracy", "max"),
        ("map_50", "max"),
        ("iou_time", "max"),
        ("ema_iou_error", "max"),
    ],
)
def test_less_of_a_loss_or_an_error_is_better(name: str, goal: str) -> None:
    assert Metric("val", name).goal == goal


def test_detectors_are_compared_by_average_precision() -> None:
    found = [Metric("train", "loss"), Metric("val", "map"), Metric("val", "map50")]
    assert find_metric(found, None) == Metric("val", "map")
