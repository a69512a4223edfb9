"""Files with values of a wrong type are unreadable; those that hpc-train writes fit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm.submission import Submission
from hpc_train.paths import AttemptPaths
from hpc_train.run import file_shapes
from hpc_train.run.attempts import claim_attempt, read_record
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from tests.run.runs import record_of, small_run

_MALFORMED: dict[str, dict[str, list[Any]]] = {
    "run.json": {
        "id": [1, None],
        "slurm_job_ids": ["12", [12], [["12"]], {"a": 1}],
        "changes": [[], {"x": []}, {"1": "a"}, {"\u00b2": []}],
        "versions": [[], {"torch": 2}],
        "versions_by_attempt": [{"x": {}}, {"1": []}],
        "code": [[], {"earlier": 1}, {"folder": []}, {"commit": 1}],
        "source": [[], {"file": {}}],
        "launcher": [1, []],
    },
    "submission.json": {"runs": ["abc", [1]], "batch": [[]], "token": [1]},
    "snapshot.json": {"cwd": [1], "search_path": ["a"], "files": [[], {"a": 1}], "links": [[]]},
    "sync.json": {"targets": [[], {"a": 1}]},
}
_MALFORMED_RECORD: dict[str, list[Any]] = {
    "events": [[], {"begin": 1}],
    "cause": [[], {}],
    "launcher": [[], 1],
    "hosts": ["n1", [1]],
    "start": ["yesterday", 1],
    "end": ["", 1],
    "checkpoints": ["step", [[]]],
    "rank_processes": [{}, [1]],
    "saved_step": ["1", 1.5, 10**400],
    "save_s": ["1", 10**400],
    "bad_nodes": [[], {"n1": []}],
    "exit_codes": [1, ["1"]],
}
_CASES = [
    (name, key, value)
    for name, keys in _MALFORMED.items()
    for key, values in keys.items()
    for value in values
]


@pytest.mark.parametrize(("name", "key", "value"), _CASES)
def test_a_wrong_type_makes_the_file_unreadable(tmp_path: Path, name: str, key: str, value: object) -> None:
    write_json(tmp_path / name, {key: value, "later": [1]})
    assert read_json(tmp_path / name) is None
    write_json(tmp_path / name, {"later": [1]})
    assert read_json(tmp_path / name) == {"later": [1]}


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    paths = small_run(tmp_path)
    return paths.attempt(claim_attempt(paths, "slurm", job="9", hosts=["n1"], restart=0))


def _change(attempt: AttemptPaths, /, **changes: Any) -> None:
    write_json(attempt.record, (read_json(attempt.record) or {}) | changes)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in _MALFORMED_RECORD.items() for value in values]
)
def test_an_attempt_with_a_wrong_type_has_no_record(attempt: AttemptPaths, key: str, value: object) -> None:
    _change(attempt, later=[1])
    assert read_record(attempt) is not None
    _change(attempt, **{key: value})
    assert read_record(attempt) is None


def test_an_attempt_without_a_required_key_has_no_record(attempt: AttemptPaths) -> None:
    whole = read_json(attempt.record) or {}
    del whole["start"]
    write_json(attempt.record, whole)
    assert read_record(attempt) is None


def test_a_process_that_is_not_one_is_missing_from_its_record(attempt: AttemptPaths) -> None:
    ours = Process.current()
    foreign = ours.to_json() | {"pid": -1}
    _change(attempt, rank_processes=[foreign, ours.to_json()], launcher_process=foreign)
    record = record_of(attempt)
    assert (record.rank_processes, record.launcher_process) == ([ours], None)


def test_every_field_of_a_submission_is_checked() -> None:
    assert {field.name for field in fields(Submission)} <= set(file_shapes.SHAPES["submission.json"])


def test_the_number_of_an_attempt_is_its_folders(attempt: AttemptPaths) -> None:
    """Else a forged record would end another attempt's ranks."""
    _change(attempt, attempt=7)
    assert record_of(attempt).attempt == 1


@pytest.mark.parametrize("name", ["\u00b2", "\u0663", "01", "0", "1" * 200])
def test_a_folder_with_another_name_is_not_an_attempt(tmp_path: Path, name: str) -> None:
    paths = small_run(tmp_path)
    claim_attempt(paths)
    (paths.attempts / name).mkdir()
    assert [attempt.number for attempt in paths.attempt_folders()] == [1]
