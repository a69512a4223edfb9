"""What is said of a file that is valid: modes for which a worse value is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.rules import unused_without_queue
from hpc_train.experiment.validate.task_rules import remarks
from tests.config.files import GOOD


@pytest.mark.parametrize(("task", "metric"), [(task, each) for task in TASKS for each in TASKS[task].metrics])
def test_each_metric_of_a_built_in_task_has_a_direction(tmp_path: Path, task: str, metric: str) -> None:
    path, name = tmp_path / "exp.yaml", metric.replace("*", "car")
    path.write_text(GOOD)

    def number_of_remarks(mode: str) -> int:
        stopping = f"early_stopping={{metric: {name}, mode: {mode}, patience: 3}}"
        loaded = load(path, [f"task={task}", "data.name=acme:data", stopping], check_names=False)
        return len(list(remarks(loaded.experiment)))

    assert sorted(map(number_of_remarks, ("min", "max"))) == [0, 1]


@pytest.mark.parametrize(
    ("override", "keys"), [("slurm.spare_nodes=1", ["spare_nodes"]), ("slurm.nodes=2", [])]
)
def test_spare_nodes_have_no_effect_on_this_machine(tmp_path: Path, override: str, keys: list[str]) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    job = load(path, [override], check_names=False).experiment
    assert [problem.path[-1] for problem in unused_without_queue(job)] == keys
