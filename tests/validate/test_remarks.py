"""What is said of a file that is valid: modes for which a worse value is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.rules import unused_without_queue
from hpc_train.experiment.validate.task_rules import remarks
from tests.config.files import GOOD


def said(folder: Path, *overrides: str) -> list[str]:
    path = folder / "exp.yaml"
    path.write_text(GOOD)
    return list(map(str, remarks(load(path, overrides, check_names=False).experiment)))


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


@pytest.mark.parametrize(
    ("override", "is_local", "keys"),
    [
        ("slurm.spare_nodes=1", True, ["spare_nodes"]),
        ("slurm.spare_nodes=1", False, ["spare_nodes"]),
        ("slurm.nodes=2", True, []),
        ("recovery.standby=true", True, ["standby"]),
        ("recovery.standby=true", False, []),
    ],
)
def test_keys_without_effect_are_reported(
    tmp_path: Path, override: str, is_local: bool, keys: list[str]
) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    job = load(path, [override], check_names=False).experiment
    assert [problem.path[-1] for problem in unused_without_queue(job, is_local=is_local)] == keys
