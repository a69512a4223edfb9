from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import Done, hpc_train
from tests.cli.launchers import COMPLETING
from tests.cli.test_clean import answer
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import queued_run
from tests.run.runs import change_record, small_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = small_run(tmp_path / "runs")
    write_status(paths, RunStatus(state="failed", step=4, attempt=0))
    return paths


def _refused(done: Done, run: RunPaths, why: str) -> None:
    assert done.code != 0 and why in done.err, done.err
    assert run.experiment.exists() and run.run.exists()


def test_a_run_goes_only_after_an_answer(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    _refused(hpc_train("rm", "abc"), run, "add --yes")
    done = answer(monkeypatch, "\n", "rm")
    assert done.code == 0 and "nothing was removed" in done.err and run.run.exists()
    assert f"abc  failed at step 4  0.0 MB  {run.folder}" in done.err
    done = answer(monkeypatch, "y\n", "rm")
    assert (done.code, done.out) == (0, "abc  removed\n")
    assert "Remove this run with all checkpoints" in done.err
    assert not run.folder.parent.exists(), "an experiment without runs"


def test_what_a_real_run_leaves_is_all_ours(file: Path) -> None:
    hpc_train("submit", file, "--local", "--launcher", COMPLETING)
    (paths,) = find_runs([])
    for folder in (paths.checkpoints, paths.cache, paths.wandb):
        folder.mkdir()
    (paths.folder / ".status.json.0a1b2c3d").touch()
    assert hpc_train("rm", "tiny", "--yes").code == 0
    assert not paths.folder.exists()
    done = hpc_train("submit", file, "--local", "--launcher", COMPLETING)
    assert done.code == 0 and "completed" in done.out, "the id is free again"


def test_code_goes_with_the_last_run_that_uses_it(file: Path) -> None:
    hpc_train("submit", file, "--local", "--launcher", COMPLETING, "sweep.grid={seed: [1, 2]}")
    first, second = find_runs([])
    code = (first.folder / "code").resolve()
    os.utime(code, (time.time() - 7200,) * 2)
    assert hpc_train("rm", first.folder.name, "--yes").code == 0
    assert code.is_dir() and (second.folder / "code").resolve() == code
    assert f"{code}  removed: code that no run uses" in hpc_train("rm", second.folder.name, "--yes").err
    assert not code.exists()


@pytest.mark.parametrize("state", ["pending", "running", "requeued", "failed"])
def test_a_run_that_goes_on_is_refused(run: RunPaths, state: str) -> None:
    why = f"abc: is {state}; end it with `hpc-train cancel abc` first"
    if state == "failed":  # whose launcher is still ending it
        claim_attempt(run, "local")
        why = "end it with `hpc-train cancel abc` first"
    write_status(run, RunStatus(state=state))
    _refused(hpc_train("rm", "abc", "--yes"), run, why)


def test_without_slurm_only_completed_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_programs_first(tmp_path, monkeypatch).put("squeue", "exit 1")
    paths = queued_run(tmp_path / "runs", "12")
    write_status(paths, RunStatus(state="failed"))
    assert hpc_train("rm", "abc", "--yes").code == 69
    write_status(paths, RunStatus(state="completed"))
    assert hpc_train("rm", "abc", "--yes").code == 0
    assert not paths.folder.exists()


def test_a_folder_that_holds_something_else_is_refused(run: RunPaths) -> None:
    (run.folder / "notes.txt").write_text("mine")
    _refused(hpc_train("rm", "abc", "--yes"), run, "contains files that hpc-train did not write: notes.txt")


def test_a_copy_and_a_link_are_refused(run: RunPaths, tmp_path: Path) -> None:
    copy = RunPaths(run.folder.with_name("copy"))
    run.folder.rename(copy.folder)
    _refused(hpc_train("rm", "copy", "--yes"), copy, "says in run.json that it is small/abc")
    run.folder.symlink_to(copy.folder)
    _refused(hpc_train("rm", "abc", "--yes"), copy, "is a link")


def test_another_users_run_is_refused(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    _refused(hpc_train("rm", "abc", "--yes"), run, "belongs to another user")


def test_a_run_that_somebody_starts_meanwhile_stays(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_agree(count: int) -> bool:
        change_record(run.attempt(claim_attempt(run, "local")), ranks=1)
        return True

    monkeypatch.setattr("hpc_train.cli.clean._agreed", start_and_agree)
    _refused(hpc_train("rm", "abc"), run, "another command has just started it")
    assert [each.number for each in run.attempt_folders()] == [1]
