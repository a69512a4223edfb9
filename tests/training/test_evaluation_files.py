"""Files of evaluations are complete before their row, and withdrawn with it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import StorageError
from hpc_train.paths import RunPaths
from hpc_train.training import evaluation_outputs
from hpc_train.training.evaluation_outputs import EvaluationFiles, TaskFiles


class Task:
    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        return {"table.csv": str(sums["count"]).encode()}


def names(paths: RunPaths) -> list[str]:
    return sorted(str(path.relative_to(paths.folder)) for path in paths.folder.rglob("*.csv"))


def test_a_task_names_its_files_and_averages_have_a_prefix() -> None:
    sums = {"": {"count": 2}, "ema_": {"count": 3}}
    assert TaskFiles(Task()).files(20, sums) == {"table.csv": b"2", "ema_table.csv": b"3"}


def test_a_repeated_evaluation_replaces_its_files(tmp_path: Path) -> None:
    files = EvaluationFiles(RunPaths(tmp_path))
    files.write(20, {"table.csv": b"old"})
    files.write(20, {"table.csv": b"new"})
    assert (tmp_path / "evaluations/step-00000020/table.csv").read_bytes() == b"new"
    assert names(files.paths) == ["evaluations/step-00000020/table.csv"]


def test_files_after_the_step_of_a_resume_are_withdrawn(tmp_path: Path) -> None:
    files = EvaluationFiles(RunPaths(tmp_path))
    files.withdraw(0)  # none yet
    for step in (10, 20, 123456789):
        files.write(step, {"table.csv": b""})
    (tmp_path / "evaluations/notes.csv").touch()
    files.withdraw(10)
    assert names(files.paths) == ["evaluations/notes.csv", "evaluations/step-00000010/table.csv"]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(evaluation_outputs, "replacing", full)
    with pytest.raises(StorageError, match=r"step-00000001/table\.csv: the disk is full"):
        EvaluationFiles(RunPaths(tmp_path)).write(1, {"table.csv": b""})
