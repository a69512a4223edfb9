"""Attempts are numbered once each, and their records survive a round trip."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import (
    EventLog,
    claim_attempt,
    newest_number,
    noted_signal,
    read_record,
    write_record,
)
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import read_json
from hpc_train.run.processes import Process
from tests.run.runs import record_of
from tests.run.test_checkpoints import write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


def test_attempts_count_from_one(run: RunPaths) -> None:
    assert newest_number(run) == 0
    assert [claim_attempt(run) for _ in range(3)] == [1, 2, 3]
    assert newest_number(run) == 3


def test_a_claim_lists_the_checkpoints_it_may_go_on_from(run: RunPaths) -> None:
    claim_attempt(run)
    write_checkpoint(run, 5, attempt=1)
    second = record_of(run.attempt(claim_attempt(run)))
    write_checkpoint(run, 7, attempt=1)  # by the old attempt, still alive: counts no more
    third = record_of(run.attempt(claim_attempt(run)))
    assert second.checkpoints == third.checkpoints == ["step-00000005"]
    assert [checkpoint.step for checkpoint in committed(run)] == [5]


def test_a_gap_or_a_strange_name_does_not_disturb(run: RunPaths) -> None:
    (run.attempts / "7").mkdir(parents=True)
    (run.attempts / "notes").mkdir()
    assert claim_attempt(run) == 8


def claim(folder: str) -> list[int]:
    return [claim_attempt(RunPaths(Path(folder))) for _ in range(10)]


@pytest.mark.slow
def test_of_many_that_claim_each_gets_a_number_of_its_own(run: RunPaths) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        claimed = [number for numbers in pool.map(claim, [str(run.folder)] * 4) for number in numbers]
    assert sorted(claimed) == list(range(1, 41))
    assert sorted(int(path.name) for path in run.attempts.iterdir()) == sorted(claimed)


def test_a_claim_is_recorded_at_once_and_comes_back_as_it_was_written(run: RunPaths) -> None:
    attempt = run.attempt(claim_attempt(run, "slurm"))
    record = record_of(attempt)
    assert (record.launcher, record.launcher_process) == ("slurm", Process.current())
    assert (record.attempt, record.end, record.checkpoints) == (1, None, [])
    full = replace(
        record, launcher="local", hosts=["a"], ranks=2, devices=2, rank_processes=[Process.current()]
    )
    full = full.ended([0, -9], "rank 1: killed by SIGKILL")
    write_record(attempt, full)
    assert read_record(attempt) == full
    assert full.end is not None


# When an attempt did what.


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    return attempt


def test_who_agrees_before_its_own_signal_was_asked_by_the_others(attempt: AttemptPaths) -> None:
    log = EventLog(attempt)
    log.note("agreed", "2026-11-21T15:46:39.782+00:00")
    log.signalled("SIGTERM", "2026-11-21T15:46:40.118+00:00")
    told = (read_json(attempt.events) or {})["events"]
    assert list(told) == ["signal", "agreed"]
    assert told["signal"] <= told["agreed"]
    assert noted_signal(attempt) == "SIGTERM"


def test_a_signal_of_its_own_counts_where_it_came_first(attempt: AttemptPaths) -> None:
    log = EventLog(attempt)
    log.signalled("USR2", "2026-11-21T15:46:39.500+00:00")
    log.note("agreed", "2026-11-21T15:46:39.782+00:00")
    assert (read_json(attempt.events) or {})["events"]["signal"] == "2026-11-21T15:46:39.500+00:00"
