from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import claim_attempt
from hpc_train.run_folder.status import RunStatus, write_status
from tests.cli.commands import REPOSITORY, python
from tests.run_folder.runs import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two attempts of two ranks; the second one runs, in this process."""
    paths = small_run(tmp_path / "runs")
    for attempt in (1, 2):
        claim_attempt(paths)
        for rank in (0, 1):
            paths.attempt(attempt).log(rank).write_text(f"attempt {attempt} rank {rank}\n")
    write_status(paths, RunStatus(state="running", attempt=2))
    return paths


def _logs(*arguments: str) -> tuple[int, str, str]:
    done = python("-m", "hpc_train", "logs", *arguments)
    return done.code, done.out, done.err


def test_the_newest_attempts_rank_0_is_shown(run: RunPaths) -> None:
    assert _logs("abc") == (0, "attempt 2 rank 0\n", "")


def test_rank_and_attempt_can_be_chosen(run: RunPaths) -> None:
    assert _logs("abc", "--rank", "1", "--attempt", "1") == (0, "attempt 1 rank 1\n", "")


def test_a_log_that_is_not_there_names_those_that_are(run: RunPaths) -> None:
    code, out, err = _logs("abc", "--rank", "7")
    assert (code, out) == (2, "")
    assert "attempt 2 has rank-0.log, rank-1.log" in err


def test_following_ends_with_the_run_and_misses_nothing(run: RunPaths) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_train", "logs", "-f", "abc"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"attempt 2 rank 0\n"
    with run.attempt(2).log(0).open("a") as log:
        log.write("more\n")
    assert process.stdout.readline() == b"more\n"
    with run.attempt(2).log(0).open("a") as log:
        log.write("the end, \xe9")
    write_status(run, RunStatus(state="completed", attempt=2))
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.decode()) == (0, "the end, \xe9")


def test_following_an_earlier_attempt_ends_at_once(run: RunPaths) -> None:
    assert _logs("abc", "-f", "--attempt", "1") == (0, "attempt 1 rank 0\n", "")
