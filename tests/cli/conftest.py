"""An experiment file, a folder to work in, and no memory of earlier tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.cli import launchers
from tests.plan.files import EXPERIMENT
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint


@pytest.fixture(autouse=True)
def _no_requests() -> None:
    launchers.requests.clear()
    launchers.queued.clear()
    launchers.refusals.clear()


@pytest.fixture(autouse=True)
def _little_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where there is little to take a snapshot of: reading this repository takes most of a submit."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def saved(tmp_path: Path) -> RunPaths:
    """A run ``abc`` of one attempt, with checkpoints of steps 5 and 10."""
    paths = small_run(tmp_path / "runs")
    begin_attempt(paths, 1)
    for step in (5, 10):
        write_checkpoint(paths, step, attempt=1)
    return paths


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT)
    return path
