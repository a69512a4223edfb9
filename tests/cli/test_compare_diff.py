"""``compare A B --diff``: keys, versions and code in which two runs differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import compare_diff
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.code import snapshot
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json
from tests.cli.commands import hpc_train, stderr_of
from tests.run.code.trees import take, work_tree
from tests.run.runs import change_facts, small_experiment

_OLD = "import torch\nWIDTH = 16\n"


def _made(run_id: str, folder: Path | None, **changes: Any) -> RunPaths:
    paths = RunPaths(runs_root() / "small" / run_id)
    taken = None if folder is None else take(runs_root() / ".code", folder)
    assert create_run(paths, small_experiment(**changes), run_id, 10, snapshot=taken)
    return paths


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunPaths, RunPaths]:
    """Two runs of other seeds, versions and code."""
    tree = work_tree(tmp_path / "work", "same.py", "gone.py")
    (tree / "model.py").write_text(_OLD)
    first = _made("aaa", tree)
    (tree / "model.py").write_text(_OLD.replace("16", "32 \x1b[31m"))
    (tree / "gone.py").unlink()
    (tree / "new.py").write_text("NEW = 1\n")
    (tree / "table.bin").write_bytes(b"\0\1")
    second = _made("bbb", tree, seed=3, early_stopping={"metric": "loss", "mode": "min", "patience": 2})
    versions = (read_json(second.run) or {})["versions"]
    change_facts(second, versions=versions | {"torch": "1.0"})
    return first, second


def test_keys_versions_and_code_are_shown_as_diffs(pair: tuple[RunPaths, RunPaths]) -> None:
    versions = (read_json(pair[0].run) or {})["versions"]
    done = hpc_train("compare", "aaa", "bbb", "--diff")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "--- aaa",
        "+++ bbb",
        "experiment: 5 keys differ",
        "- seed: 0",
        "+ seed: 3",
        "+ early_stopping.metric: loss",
        "+ early_stopping.mode: min",
        "+ early_stopping.patience: 2",
        "+ early_stopping.min_delta: 0.0",
        "versions: 1 package differs",
        f"- torch: {versions['torch']}",
        "+ torch: 1.0",
        "code: 4 files differ",
        "A new.py",
        "A table.bin",
        "M model.py",
        "D gone.py",
        "--- aaa/gone.py",
        "+++ bbb/gone.py",
        "@@ -1 +0,0 @@",
        "-gone.py",
        "--- aaa/model.py",
        "+++ bbb/model.py",
        "@@ -1,2 +1,2 @@",
        " import torch",
        "-WIDTH = 16",
        "+WIDTH = 32 \\x1b[31m",
        "--- aaa/new.py",
        "+++ bbb/new.py",
        "@@ -0,0 +1 @@",
        "+NEW = 1",
        "table.bin: not compared: too long, not text, or not readable",
    ]


def test_json_has_the_same(pair: tuple[RunPaths, RunPaths]) -> None:
    found = json.loads(hpc_train("compare", *(paths.folder for paths in pair), "--diff", "--json").out)
    assert [run["id"] for run in found["runs"]] == ["aaa", "bbb"]
    assert found["settings"]["seed"] == [0, 3]
    assert found["versions"]["torch"][1] == "1.0"
    assert found["code"]["changed"] == ["tree/model.py"]
    assert found["code"]["added"] == ["tree/new.py", "tree/table.bin"]
    assert "+WIDTH = 32 \x1b[31m" in found["code"]["diff"]


def test_a_long_diff_is_truncated(pair: tuple[RunPaths, RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_diff, "_MAX_LINES", 5)
    lines = hpc_train("compare", "aaa", "bbb", "--diff").out.splitlines()
    assert lines[-1] == "… cut after 5 lines"
    assert lines[-2] == "--- aaa/model.py"


def test_equal_runs_and_runs_without_code_are_said_to_be(tmp_path: Path) -> None:
    _made("aaa", None)
    _made("bbb", None)
    assert hpc_train("compare", "aaa", "bbb", "--diff").out.splitlines()[2:] == [
        "experiment: no key differs",
        "versions: no package differs",
        "code: unknown: aaa has no snapshot of its code",
    ]


def test_a_snapshot_that_is_gone_hides_nothing_else(pair: tuple[RunPaths, RunPaths]) -> None:
    folder = snapshot.linked(pair[1])
    assert folder is not None
    shutil.rmtree(folder)
    done = hpc_train("compare", "aaa", "bbb", "--diff")
    assert done.code == 0
    assert "+ seed: 3" in done.out and "the code that this run uses is gone" in done.out


def test_a_file_outside_of_the_snapshot_is_not_read(pair: tuple[RunPaths, RunPaths], tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    folder = snapshot.linked(pair[1])
    assert folder is not None
    (folder / "tree" / "new.py").unlink()
    (folder / "tree" / "new.py").symlink_to(tmp_path / "secret.txt")
    done = hpc_train("compare", "aaa", "bbb", "--diff")
    assert "secret" not in done.out and "new.py: not compared" in done.out


def test_two_runs_are_needed(pair: tuple[RunPaths, RunPaths]) -> None:
    assert "--diff: compares two runs, and these are 1; name two" in stderr_of(2, "compare", "aaa", "--diff")
    for options in (["--csv"], ["--over", "seed"], ["--metric", "loss"]):
        assert hpc_train("compare", "small", "--diff", *options).code == 2


def test_only_diffs_read_snapshots(pair: tuple[RunPaths, RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise AssertionError("a snapshot was read")

    monkeypatch.setattr(snapshot, "linked", refused)
    assert hpc_train("compare", "small").code == 0
