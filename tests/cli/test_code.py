"""Which code a run uses, as commands see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.code import code_files
from hpc_train.run.code.snapshot import linked
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs
from tests.cli.commands import Done, hpc_train, stderr_of
from tests.cli.launchers import COMPLETING, FAILING, requests
from tests.run.code.trees import work_tree, write
from tests.run.test_checkpoints import write_checkpoint


@pytest.fixture
def tree(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a git work tree that holds the experiment file's runs, too."""
    folder = work_tree(tmp_path / "work", "model.py", ".env")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(folder / "runs"))
    return folder


@pytest.fixture
def failed(tree: Path, file: Path) -> RunPaths:
    _submit(file)
    (paths,) = find_runs([])
    return paths


def _submit(file: Path, *arguments: str) -> Done:
    return hpc_train("submit", file, "--local", "--launcher", FAILING, *arguments)


def _code(paths: RunPaths) -> dict[str, Any]:
    code: dict[str, Any] = (read_json(paths.run) or {})["code"]
    return code


def _snapshots() -> list[Path]:
    return sorted((runs_root() / ".code").iterdir())


def test_all_runs_of_a_submit_use_one_snapshot(tree: Path, file: Path) -> None:
    done = _submit(file, "sweep={grid: {seed: [0, 1]}}", "data.root=.")
    (snapshot,) = _snapshots()
    assert [linked(paths) for paths in find_runs([])] == [snapshot] * 2
    assert {path.name for path in (snapshot / "tree").iterdir()} == {"model.py"}, "runs/ is none of it"
    assert [_code(paths)["snapshot"] for paths in find_runs([])] == [snapshot.name] * 2
    assert "code: excluded from the snapshot: .env (may contain a secret)\n" in done.err
    assert "excluded" not in _submit(file, "--new", "data.root=.").err, "once"
    assert _snapshots() == [snapshot]


def test_submitting_what_is_there_takes_no_snapshot(failed: RunPaths, tree: Path, file: Path) -> None:
    write(tree, "new.py")
    write_checkpoint(failed, 5, attempt=1)
    assert _submit(file).code == 1
    assert len(_snapshots()) == 1
    _submit(file, "--new")
    assert len(_snapshots()) == 2


def test_submitting_what_is_there_names_code_that_has_changed_since(tree: Path, file: Path) -> None:
    words = ("submit", file, "--local", "sweep={grid: {seed: [0, 1]}}", "--launcher", COMPLETING)
    assert hpc_train(*words).code == 0
    assert "code:" not in hpc_train(*words).err
    write(tree, "new.py")
    (line,) = [line for line in hpc_train(*words).err.splitlines() if ": code: " in line]
    differs = "code: 1 file differs from the snapshot that it uses: new.py (new)"
    assert line.endswith(f"(and 1 more run): {differs}; submit with --new trains with the current code")


def test_too_much_code_creates_no_run(tree: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "MAX_FILES", 1)
    write(tree, "b.py")
    done = _submit(file)
    assert (done.code, "add what is not code to .gitignore" in done.err) == (2, True)
    assert find_runs([]) == []


@pytest.mark.fault(39)
def test_a_resume_keeps_the_code_and_says_what_has_changed(failed: RunPaths, tree: Path) -> None:
    before, run = linked(failed), failed.folder.name
    assert "code:" not in hpc_train("resume", run).err
    (tree / "model.py").write_text("changed")
    write(tree, "new.py")
    told = "2 files differ from the snapshot that this run uses: model.py, new.py (new)"
    assert f"{run}: code: {told}; resume with --code new takes" in hpc_train("resume", run).err
    assert linked(failed) == before
    assert len(_snapshots()) == 1


def test_resume_elsewhere_has_no_diff(failed: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path = failed.folder.parents[3]
    monkeypatch.chdir(tmp_path)
    assert "code:" not in hpc_train("resume", failed.folder.name).err
    assert len(requests) == 2


def test_resume_needs_no_new_snapshot(failed: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "MAX_FILES", 0)
    hpc_train("resume", failed.folder.name)
    assert len(requests) == 2
    assert hpc_train("resume", failed.folder.name, "--code", "new").code == 2
    assert len(requests) == 2


def test_code_new_takes_the_current_code_and_says_what_it_changes(failed: RunPaths, tree: Path) -> None:
    before, run = linked(failed), failed.folder.name
    assert before is not None
    (tree / "model.py").write_text("changed")
    done = hpc_train("resume", run, "--code", "new")
    assert f"{run}: code: from this attempt on that of {tree}: 1 file differs: model.py\n" in done.err
    now = linked(failed)
    assert now is not None
    assert (now / "tree" / "model.py").read_text() == "changed"
    code = _code(failed)
    assert (code["snapshot"], code["dirty"]) == (now.name, True)
    (earlier,) = code["earlier"]
    assert (earlier["snapshot"], earlier["until_attempt"]) == (before.name, 1)
    again = hpc_train("resume", run, "--code", "new")
    assert "code: nothing has changed since" in again.err


def test_code_new_replaces_a_snapshot_that_is_gone(failed: RunPaths) -> None:
    (linked(failed) or Path() / "snapshot.json").rename(runs_root() / "moved")
    assert "--code new" in stderr_of(74, "resume", failed.folder.name)
    assert len(requests) == 1
    assert hpc_train("resume", failed.folder.name, "--code", "new", "--launcher", COMPLETING).code == 0
    assert linked(failed) is not None


def test_a_run_without_a_snapshot_gets_one(failed: RunPaths) -> None:
    failed.code.unlink()
    done = hpc_train("resume", failed.folder.name)
    assert "code: there was no snapshot of it" in done.err
    assert linked(failed) == _snapshots()[0]


def test_another_word_than_new_is_a_usage_error(failed: RunPaths) -> None:
    assert "write --code new" in stderr_of(2, "resume", failed.folder.name, "--code", "newest")
