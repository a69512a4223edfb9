"""A run folder appears whole, once, and says what its attempts run."""

from __future__ import annotations

import stat
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from hpc_train.errors import StorageError
from hpc_train.experiment.plan.sweep import content_hash
from hpc_train.paths import RunPaths
from hpc_train.run import frozen_experiment
from hpc_train.run.attempts import EventLog, claim_attempt, tell_end
from hpc_train.run.create import (
    create_run,
    effective_experiment,
    note_change,
    note_versions,
    noted_changes,
    noted_versions,
    origin_of,
    refused_changes,
)
from hpc_train.run.files import read_json
from hpc_train.run.run_status import RunStatus, read_status
from hpc_train.run.versions import versions
from tests.run.code.trees import git, work_tree
from tests.run.runs import small_experiment, small_run


def test_a_new_run_is_private_whole_and_pending(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    for folder in (paths.folder, paths.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert frozen_experiment.read(paths) == small_experiment()
    assert read_status(paths) == RunStatus("pending", 0, 10)
    assert origin_of(paths) is None
    run = read_json(paths.run)
    assert run is not None
    assert (run["version"], run["id"], run["name"]) == (1, "abc", "small")
    assert run["content_hash"] == content_hash(small_experiment())
    assert (run["launcher"], run["slurm_job_ids"], run["changes"]) == ("local", [], {})
    assert {"hpc-train", "python", "torch", "torchvision", "timm"} <= run["versions"].keys()
    assert [path.name for path in paths.folder.parent.iterdir()] == ["abc"]


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    before = paths.run.read_bytes()
    assert not create_run(paths, small_experiment(seed=1), "abc", 10)
    assert paths.run.read_bytes() == before


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpc_train.run.create.sync_folder", fail)
    with pytest.raises(OSError, match="No space"):
        create_run(RunPaths(tmp_path / "small" / "abc"), small_experiment(), "abc", 10)
    assert not any((tmp_path / "small").iterdir())


def create(folder: str) -> bool:
    return create_run(RunPaths(Path(folder)), small_experiment(), "abc", 10)


@pytest.mark.slow
def test_of_many_that_create_one_run_exactly_one_does(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        for number in range(5):
            made = list(pool.map(create, [str(tmp_path / "runs" / str(number))] * 8))
            assert sorted(made) == [False] * 7 + [True]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == list("01234")


def test_the_commit_of_the_current_folder_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (read_json(small_run(tmp_path / "outside").run) or {})["code"] is None
    tree = work_tree(tmp_path / "code", "file")
    monkeypatch.chdir(tree)
    clean = (read_json(small_run(tmp_path / "clean").run) or {})["code"]
    (tree / "file").write_text("2")
    dirty = (read_json(small_run(tmp_path / "dirty").run) or {})["code"]
    assert clean == {"commit": git(tree, "rev-parse", "HEAD"), "dirty": False}
    assert dirty == clean | {"dirty": True}


def test_changes_hold_from_their_attempt_on_and_the_latest_wins(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    note_change(paths, 2, ["data.workers=4", "parallel.strategy=fsdp"])
    note_change(paths, 10, ["data.workers=1"])
    experiments = {attempt: effective_experiment(paths, attempt) for attempt in (1, 2, 9, 10)}
    assert [each.data.workers for each in experiments.values()] == [0, 4, 4, 1]
    assert [each.parallel.strategy for each in experiments.values()] == ["ddp", "fsdp", "fsdp", "fsdp"]
    assert experiments[1] == small_experiment() == frozen_experiment.read(paths)
    assert (read_json(paths.run) or {})["changes"]["10"] == ["data.workers=1"]


def test_a_key_changed_after_its_section_keeps_its_value(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    note_change(paths, 2, ["checkpoint.keep=2"])
    note_change(paths, 3, ["checkpoint={every_steps: 100}"])
    note_change(paths, 4, ["checkpoint.keep=6"])
    kept = [effective_experiment(paths, attempt).checkpoint for attempt in (2, 3, 4)]
    assert [each.keep for each in kept] == [2, type(kept[0])().keep, 6]
    assert kept[2].every_steps == 100


@pytest.mark.parametrize(
    ("codes", "has_stepped", "is_kept"),
    [
        ([65], False, False),
        ([75, 65], False, False),  # requeued before a first step, and refused then
        ([75, 65], True, True),  # trained with: what was refused later is something else
        ([1], False, True),
    ],
)
def test_refused_changes_drop(tmp_path: Path, codes: list[int], has_stepped: bool, is_kept: bool) -> None:
    paths = small_run(tmp_path)
    change = "parallel.strategy=fsdp"
    note_change(paths, 1, [change])
    for code in codes:
        attempt = paths.attempt(claim_attempt(paths))
        assert noted_changes(paths, attempt.number) == [change]
        tell_end(attempt, 1, code)
        if has_stepped and attempt.number == 1:
            EventLog(attempt).note("first_step")
    assert noted_changes(paths, len(codes) + 1) == ([change] if is_kept else [])
    assert refused_changes(paths) == ([] if is_kept else [change])
    note_change(paths, len(codes) + 1, ["data.workers=2"])
    assert noted_changes(paths, len(codes) + 2)[-1] == "data.workers=2"


def test_a_change_needs_a_readable_run(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    paths.run.write_text("{")
    with pytest.raises(StorageError, match=r"run\.json: missing or not written by hpc-train"):
        note_change(paths, 2, ["data.workers=4"])


def test_versions_are_noted_with_the_attempt_that_has_others_first(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    created = noted_versions(paths)
    assert created == versions()
    note_versions(paths, 2, created)
    assert "versions_by_attempt" not in (read_json(paths.run) or {})
    for attempt, torch in ((9, "2.99.0"), (10, "3.0.0"), (11, "3.0.0")):
        note_versions(paths, attempt, created | {"torch": torch})
    noted = (read_json(paths.run) or {})["versions_by_attempt"]
    assert {attempt: found["torch"] for attempt, found in noted.items()} == {"9": "2.99.0", "10": "3.0.0"}
    assert noted_versions(paths)["torch"] == "3.0.0"
    assert (read_json(paths.run) or {})["versions"] == created
