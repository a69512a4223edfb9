"""Attempts are numbered once each, and their records survive a round trip."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt, newest_number, read_record, write_record
from hpc_train.run.checkpoints import Manifest, committed
from hpc_train.run.processes import Process


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


def save(run: RunPaths, step: int, attempt: int) -> None:
    run.checkpoint(step).folder.mkdir(parents=True)
    Manifest(step, attempt, 1, {}).write(run.checkpoint(step))


def test_attempts_count_from_one(run: RunPaths) -> None:
    assert newest_number(run) == 0
    assert [claim_attempt(run) for _ in range(3)] == [1, 2, 3]
    assert newest_number(run) == 3


def test_a_claim_is_recorded_from_the_first_moment(run: RunPaths) -> None:
    number = claim_attempt(run, "slurm")
    record = read_record(run.attempt(number))
    assert record is not None and record.launcher == "slurm"
    assert record.launcher_process == Process.current()
    assert (record.attempt, record.end, record.checkpoints) == (1, None, [])


def test_a_claim_lists_the_checkpoints_it_may_go_on_from(run: RunPaths) -> None:
    claim_attempt(run)
    save(run, 5, attempt=1)
    second = read_record(run.attempt(claim_attempt(run)))
    save(run, 7, attempt=1)  # by the old attempt, still alive: counts no more
    third = read_record(run.attempt(claim_attempt(run)))
    assert second is not None and third is not None
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


def test_a_record_comes_back_as_it_was_written(run: RunPaths) -> None:
    attempt = run.attempt(claim_attempt(run))
    record = read_record(attempt)
    assert record is not None
    full = replace(
        record, launcher="local", hosts=["a"], ranks=2, devices=2, rank_processes=[Process.current()]
    )
    full = full.ended([0, -9], "rank 1: killed by SIGKILL")
    write_record(attempt, full)
    assert read_record(attempt) == full
    assert full.end is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": 1}'])
def test_an_unreadable_record_is_none(run: RunPaths, text: str) -> None:
    attempt = run.attempt(claim_attempt(run))
    attempt.record.write_text(text)
    assert read_record(attempt) is None
