"""Words that name runs: each printed one is accepted, and runs that this user may not read are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.cli import evaluate
from hpc_train.paths import RunPaths
from hpc_train.run import find
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import read_status, write_status
from tests.cli.commands import hpc_train, stderr_of
from tests.cli.launchers import COMPLETING, FAILING
from tests.run.runs import small_run
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
    assert f"{name}: completed at step 5/9" in stderr_of(0, "resume", name, "--launcher", COMPLETING)
    assert [read_status(paths).state for paths in twins] == ["failed", "completed"]


def test_a_run_of_another_folder(
    twins: list[RunPaths], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "others"))
    folder = twins[0].folder
    write_status(twins[0], replace(read_status(twins[0]), state="completed"))
    assert f"{folder}: completed already" in hpc_train("resume", folder).err
    assert hpc_train("status", folder).out.splitlines()[1].startswith(f"{folder}  ")


_COMMANDS = (
    ["status"], ["verify"], ["logs", "--last"], ["compare"], ["export", "-o", "x.safetensors"],
    ["rm", "--yes"],
)  # fmt: skip


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of two runs; the tests' user may be root, who can read everything."""
    for seed, run_id in enumerate(("aaa", "bbb")):
        paths = small_run(tmp_path / "runs", run_id, seed=seed)
    is_readable = find.is_readable
    monkeypatch.setattr(find, "is_readable", lambda run: run != paths and is_readable(run))
    monkeypatch.setattr(evaluate, "run_child", lambda *arguments: 0)
    return paths.folder


@pytest.mark.parametrize("command", _COMMANDS)
def test_what_is_skipped_is_named(command: list[str], hidden: Path) -> None:
    done = hpc_train(command[0], "small", *command[1:])
    assert f"skipped, since you may not read them: {hidden};" in done.err


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_run_that_may_not_be_read_is_not_unknown(command: list[str], hidden: Path) -> None:
    for word in ("bbb", "small/bbb", str(hidden)):
        assert "exists, but you may not read it" in stderr_of(2, command[0], word, *command[1:])
