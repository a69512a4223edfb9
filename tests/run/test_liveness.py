"""Processes are told apart over time, and left-over ranks are ended before another attempt begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, claim_attempt, now, read_record, write_record
from hpc_train.run.liveness import end_living, living, silent_s
from hpc_train.run.processes import Process
from tests.waiting import HANG_LIMIT_S

_RANK = "print(flush=True); input()"


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process and wait until it runs: before, the kernel shows an empty command line."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


@pytest.fixture
def child(run: RunPaths) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed, started as a rank of attempt 1 of ``run``."""
    environment = os.environ | {"HPC_TRAIN_ATTEMPT": "1", "HPC_TRAIN_RUN_FOLDER": str(run.folder)}
    process = _started([sys.executable, "-c", _RANK], environment)
    yield process
    process.kill()
    process.communicate()


def identity(process: subprocess.Popen[bytes]) -> Process:
    found = Process.of(process.pid)
    assert found is not None
    return found


def record_of(launcher: Process, ranks: list[Process]) -> AttemptRecord:
    return AttemptRecord(1, now(), [], launcher, "local", ["here"], len(ranks), len(ranks), ranks)


def test_silence_lasts_since_the_newest_file_of_the_attempt(run: RunPaths) -> None:
    claim_attempt(run)
    record = AttemptRecord(1, now(), [], None, "local", ["here"], 1, 1, [])
    run.status.touch()
    files = [run.status, run.attempt(1).folder / "heartbeat"]
    for path, age_s in zip(files, (5000, 1000), strict=True):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    for path in run.attempt(1).folder.iterdir():
        os.utime(path, (time.time() - 1000,) * 2)
    assert silent_s(run, record) == pytest.approx(1000, abs=HANG_LIMIT_S)


def test_a_process_is_alive_until_it_ended(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert process.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet waited for
    assert process.is_alive() is False
    child.wait()
    assert process.is_alive() is False
    assert Process.of(child.pid) is None


def test_a_reused_process_number_is_not_it(run: RunPaths, child: subprocess.Popen[bytes]) -> None:
    older = replace(identity(child), start_ticks=1)
    assert older.is_alive() is False
    assert not older.send(signal.SIGKILL, run.folder, 1)
    assert child.poll() is None


@pytest.mark.parametrize(
    ("changes", "is_alive"),
    [
        ({"boot_id": "another"}, False),  # from before a reboot
        ({"host": "elsewhere", "boot_id": "another"}, None),
        ({"pid_namespace": "pid:[1]"}, None),  # of another container
        ({"host": "before-dhcp"}, True),
    ],
)
def test_processes_of_other_boots_and_machines(changes: dict[str, str], is_alive: bool | None) -> None:
    assert replace(Process.current(), **changes).is_alive() is is_alive


@pytest.mark.parametrize("data", [None, {}, [], {"pid": 1}, Process.current().to_json() | {"pid": "1"}])
def test_what_is_no_identity_is_none(data: object) -> None:
    assert Process.from_json(data) is None


def test_a_living_launchers_ranks_are_left_alone(run: RunPaths, child: subprocess.Popen[bytes]) -> None:
    attempt = run.attempt(claim_attempt(run))
    write_record(attempt, record_of(Process.current(), [identity(child)]))
    assert end_living(run) == read_record(attempt)
    assert child.poll() is None


@pytest.mark.fault(48)
def test_ranks_of_a_dead_launcher_are_ended(run: RunPaths, child: subprocess.Popen[bytes]) -> None:
    dead = replace(Process.current(), start_ticks=1)
    record = record_of(dead, [identity(child), dead])
    write_record(run.attempt(claim_attempt(run)), record)
    assert living(record) is False
    assert end_living(run) is None
    assert child.wait(HANG_LIMIT_S) == -9


@pytest.mark.parametrize("attempt", ["2", None])
def test_other_processes_stay_alive(
    run: RunPaths, child: subprocess.Popen[bytes], attempt: str | None
) -> None:
    """A forged ``attempt.json`` may name any process of the user's."""
    other = RunPaths(run.folder.parent / "other")
    other.folder.mkdir()
    named = other if attempt is None else run
    for _ in range(int(attempt or 1)):
        number = claim_attempt(named)
    write_record(
        named.attempt(number), record_of(replace(Process.current(), start_ticks=1), [identity(child)])
    )
    assert end_living(named) is None
    assert child.poll() is None


def test_which_attempts_live(run: RunPaths) -> None:
    assert end_living(run) is None, "no attempt"
    elsewhere = replace(Process.current(), host="elsewhere", boot_id="another")
    write_record(run.attempt(claim_attempt(run)), record_of(elsewhere, []))
    assert end_living(run) is not None, "nobody here can see its launcher"
    write_record(run.attempt(claim_attempt(run)), record_of(Process.current(), []).ended([0], None))
    assert end_living(run) is None
