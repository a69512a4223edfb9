"""An experiment file, a folder to work in, and no memory of earlier tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli.replayed_run import ReplayedRun
from hpc_train.paths import RunPaths
from tests.cli import launchers
from tests.plan.files import EXPERIMENT
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint
from tests.run.test_digests import write_digests


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
def resumed(saved: RunPaths) -> ReplayedRun:
    """The same run: 2 ranks trained steps 1 to 5, then one 6 and 7, then 2 the rest: three attempts."""
    checkpoints = [checkpoint.folder.name for checkpoint in saved.checkpoint_folders()]
    for attempt, ranks in ((1, 2), (2, 1), (3, 2)):
        begin_attempt(saved, attempt)
        record = {"attempt": attempt, "start": "2026-01-01T00:00:00+00:00", "ranks": ranks}
        saved.attempt(attempt).record.write_text(json.dumps(record | {"checkpoints": checkpoints}))
    write_digests(saved.digests, [1] * 5 + [2] * 2 + [3] * 5)
    return ReplayedRun(saved, "abc", uses_new_code=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT)
    return path
