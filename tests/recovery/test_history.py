"""The status of a run does not claim that the dead are running."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.recovery import history
from hpc_train.recovery.budgets import ResolvedLimits
from hpc_train.recovery.diagnosis import Diagnosis
from hpc_train.recovery.history import current_status, effective_recovery, ended_unseen, first_row
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.create import effective_experiment, note_change
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.run.runs import change_facts, change_record, record_of, small_run, write_rows

RUNNING = RunStatus("running", 5, 10, 0.5, 1)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return small_run(tmp_path)


def begin_attempt(run: RunPaths, launcher_process: Process, launcher: str = "local") -> None:
    change_record(run.attempt(claim_attempt(run)), launcher=launcher, launcher_process=launcher_process)


def dead() -> Process:
    return replace(Process.current(), start_ticks=1)


@pytest.mark.parametrize(
    ("changes", "launcher"),
    [
        ({}, "local"),  # it lives
        ({"start_ticks": 1}, "slurm"),  # another launcher answers for itself
        ({"host": "elsewhere", "boot_id": "another"}, "local"),
    ],
)
def test_a_run_with_a_launcher_is_running(run: RunPaths, changes: dict[str, Any], launcher: str) -> None:
    begin_attempt(run, replace(Process.current(), **changes), launcher)
    write_status(run, RUNNING)
    assert current_status(run) == RUNNING


@pytest.mark.parametrize("state", ["completed", "interrupted", "failed", "cancelled", "requeued"])
def test_an_end_is_never_corrected(run: RunPaths, state: str) -> None:
    begin_attempt(run, dead())
    ended = replace(RUNNING, state=state, reason="said")
    write_status(run, ended)
    assert current_status(run) == ended


def test_a_late_end_is_not_overwritten(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(run, RUNNING)
    completed = replace(RUNNING, state="completed", step=10)

    def end_and_die(_: RunPaths) -> bool:
        write_status(run, completed)
        return True

    monkeypatch.setattr(history, "_is_orphaned", end_and_die)
    assert current_status(run) == completed == read_status(run)


def test_a_run_whose_creator_died_before_its_first_attempt_failed(run: RunPaths) -> None:
    assert current_status(run).state == "pending"
    change_facts(run, creator=dead().to_json())
    assert current_status(run).reason == "launcher died"


def test_an_unwritable_correction_is_shown(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_attempt(run, dead())
    write_status(run, RUNNING)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(history, "write_status", refuse)
    assert current_status(run).reason == "launcher died"


LIMITS = ("max_preemptions", "max_crashes", "max_without_progress", "exclude_nodes_for_h")


def _limits(run: RunPaths) -> dict[str, object]:
    limits = effective_recovery(run, 1)
    return {key: getattr(limits, key) for key in LIMITS}


@pytest.mark.parametrize(
    "section", [{}, {"max_preemptions": 7, "max_crashes": 0, "exclude_nodes_for_h": 0.5}]
)
def test_limits_are_those_of_the_experiment(tmp_path: Path, section: dict[str, object]) -> None:
    run = small_run(tmp_path, recovery=section)
    experiment = effective_experiment(run, 1).recovery
    assert _limits(run) == {key: getattr(experiment, key) for key in LIMITS}
    assert isinstance(effective_recovery(run, 1), ResolvedLimits), "without the schema"
    note_change(run, 1, ["recovery.max_crashes=9"])
    assert _limits(run)["max_crashes"] == 9


@pytest.mark.parametrize(
    "wrong",
    [{"max_crashes": -1}, {"max_crashes": True}, {"exclude_nodes_for_h": 1e300}, {"max_preemptions": "1"}],
)
def test_limits_that_hpc_train_did_not_write_are_an_error(run: RunPaths, wrong: dict[str, object]) -> None:
    data = read_json(run.resolved)
    assert data is not None
    write_json(run.resolved, data | {"recovery": data["recovery"] | wrong})
    with pytest.raises(BadFileError, match="recovery"):
        effective_recovery(run, 1)


def test_a_lost_attempt_ended_when_its_last_file_was_written(run: RunPaths) -> None:
    begin_attempt(run, dead())
    attempt = run.attempt(1)
    for path in attempt.folder.iterdir():
        os.utime(path, (1000, 1000))
    attempt.log(0).touch()
    os.utime(attempt.log(0), (2000, 2000))
    record = record_of(attempt)
    ended = ended_unseen(run, record, Diagnosis("lost", "launcher died"))
    assert ended.end == "1970-01-01T00:33:20+00:00"


@pytest.mark.parametrize(("workload", "step"), [("program", 5), ("training", None)])
def test_the_first_row_of_an_attempt_shows_where_a_program_began(
    run: RunPaths, workload: str, step: int | None
) -> None:
    change_facts(run, workload=workload)
    rows = [{"split": "train", "step": at, "attempt": number} for number, at in ((1, 3), (2, 5), (2, 6))]
    write_rows(run, rows)
    assert (first_row(run, 2), first_row(run, 3)) == (step, None)
