"""Every word by which a command prints a run is accepted by every command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import read_status, write_status
from tests.cli.commands import hpc_train
from tests.cli.launchers import COMPLETING, FAILING
from tests.run.test_checkpoints import write_checkpoint


@pytest.fixture
def twins(file: Path) -> list[RunPaths]:
    """Two failed runs of one id: a run's id does not include the experiment's name."""
    for name in ("first", "second"):
        hpc_train("submit", file, f"name={name}", "--launcher", FAILING)
    runs = find_runs([])
    assert len({paths.folder.name for paths in runs}) == 1 < len(runs)
    return runs


def test_an_ambiguous_id_is_printed_with_its_experiment(file: Path, twins: list[RunPaths]) -> None:
    name = f"second/{twins[1].folder.name}"
    write_checkpoint(twins[1], 5, attempt=1)  # else the submit starts the run again
    submitted = hpc_train("submit", file, "name=second", "--launcher", FAILING)
    assert f"{name}: failed" in submitted.err and f"`hpc-train resume {name}`" in submitted.err
    assert submitted.out.startswith(f"{name}  failed")
    for command in ("verify", "cancel", "clean"):
        done = hpc_train(command, name)
        assert name in done.err + done.out, command
    assert name in hpc_train("status").out
    resumed = hpc_train("resume", name, "--launcher", COMPLETING)
    assert resumed.code == 0 and f"{name}: completed at step 5/9" in resumed.err
    assert [read_status(paths).state for paths in twins] == ["failed", "completed"]


def test_a_run_of_another_folder(
    twins: list[RunPaths], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "others"))
    folder = twins[0].folder
    write_status(twins[0], replace(read_status(twins[0]), state="completed"))
    assert f"{folder}: completed already" in hpc_train("resume", folder).err
    assert hpc_train("status", folder).out.splitlines()[1].startswith(f"{folder}  ")
