from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli.changes import changes_on_resume
from hpc_train.experiment.validate.loading import load
from tests.plan.files import loaded
from tests.run.runs import small_experiment


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ([], ["device=auto"], ["device=auto"]),
        (["data.root=a"], [], ["data.root=null"]),
        ([], ["data.root='12'"], ['data.root="12"']),
        ([], ["data.root='a: b'"], ['data.root="a: b"']),
        ([], ["logging.wandb={project: x}"], ['logging.wandb={"project": "x"}']),
        (["logging.wandb={project: x}"], ["logging.wandb={project: y}"], ["logging.wandb.project=y"]),
        ([], ["name=other", "slurm={nodes: 1}", "sweep.grid={seed: [1]}"], []),
    ],
)
def test_each_changed_key_is_named_once_and_leads_to_what_is_wanted(
    tmp_path: Path, before: list[str], after: list[str], changes: list[str]
) -> None:
    frozen, wanted = loaded(tmp_path, *before).experiment, loaded(tmp_path, *after).experiment
    assert [change.override for change in changes_on_resume(frozen, wanted)] == changes
    resumed = load(tmp_path / "exp.yaml", [*before, *changes]).experiment
    assert changes_on_resume(resumed, wanted) == []


def test_a_free_mapping_is_given_whole() -> None:
    """No KEY=VALUE takes a key out."""
    frozen = small_experiment(logging={"loggers": {"a": {}, "b": {}}})
    wanted = small_experiment(logging={"loggers": {"a": {}}})
    (change,) = changes_on_resume(frozen, wanted)
    assert change.override == 'logging.loggers={"a": {}}'
