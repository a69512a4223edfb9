"""What is said of a file that is valid: modes for which a worse value is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.data_facts.built_in import TASKS
from hpc_train.validate.loading import load
from hpc_train.validate.task_rules import remarks
from tests.config.files import GOOD


def said(folder: Path, *overrides: str) -> list[str]:
    path = folder / "exp.yaml"
    path.write_text(GOOD)
    return list(map(str, remarks(load(path, overrides, check_names=False).experiment)))


SEARCH = "sweep.search={{trials: 2, parameters: {{seed: {{int: [1, 9]}}}}, metric: {metric}, mode: {mode}}}"


@pytest.mark.parametrize(
    ("override", "remark"),
    [
        (
            "checkpoint.best={metric: accuracy, mode: min}",
            "checkpoint.best.mode: min takes a lower accuracy for the better one; write max, unless",
        ),
        (
            "early_stopping={metric: val/loss, mode: max, patience: 3}",
            "early_stopping.mode: max takes a higher loss for the better one; write min, unless",
        ),
        (
            SEARCH.format(metric="val/accuracy_top5", mode="min"),
            "sweep.search.mode: min takes a lower val/accuracy_top5 for the better one; write max, unless",
        ),
        (
            SEARCH.format(metric="train/loss", mode="max"),
            "sweep.search.mode: max takes a higher train/loss for the better one; write min, unless",
        ),
    ],
)
def test_a_mode_that_looks_for_the_worst_value_is_remarked_on(
    tmp_path: Path, override: str, remark: str
) -> None:
    (line,) = said(tmp_path, override)
    assert line.startswith(remark)


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.best={metric: accuracy, mode: max}"],
        ["early_stopping={metric: loss, mode: min, patience: 3}"],
        [SEARCH.format(metric="val/loss", mode="min")],
        # A plug-in's metrics may mean anything.
        ["task=acme.tasks:Task", "checkpoint.best={metric: accuracy, mode: min}"],
        # IoU of a class that is called error.
        ["task=segmentation", "data.name=acme:data", "checkpoint.best={metric: iou_error, mode: max}"],
        [],
    ],
)
def test_a_usual_mode_is_not_remarked_on(tmp_path: Path, overrides: list[str]) -> None:
    assert said(tmp_path, *overrides) == []


@pytest.mark.parametrize(("task", "metric"), [(task, each) for task in TASKS for each in TASKS[task].metrics])
def test_each_metric_of_a_built_in_task_has_a_direction(tmp_path: Path, task: str, metric: str) -> None:
    modes = [
        bool(
            said(
                tmp_path, f"task={task}", "data.name=acme:data", f"early_stopping={{metric: {name}, {rest}}}"
            )
        )
        for name in [metric.replace("*", "car")]
        for rest in ("mode: min, patience: 3", "mode: max, patience: 3")
    ]
    assert sorted(modes) == [False, True]
