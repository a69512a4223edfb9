"""What a process was doing is written down, by itself or by what the kernel says of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from hpc_train.run.files import UnreadableFileError
from hpc_train.run.processes import Process
from hpc_train.training.health.stacks import (
    GONE,
    describe,
    in_words,
    save_flight_record,
    save_stacks,
    state_of,
)
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def process_of(child: subprocess.Popen[bytes]) -> Process:
    process = Process.of(child.pid)
    assert process is not None
    return process


def wait_for_state(process: Process, state: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while state_of(process) != state:
        assert time.monotonic() < deadline, state_of(process)
        time.sleep(0.01)


@pytest.mark.timeout(HANG_LIMIT_S)
def test_a_pipe_in_the_stacks_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stacks")
    with pytest.raises(UnreadableFileError):
        save_stacks(tmp_path / "stacks", "rank 2, step 57")


def test_the_stacks_of_all_threads_are_written_under_the_header(tmp_path: Path) -> None:
    is_over = threading.Event()

    def in_another_thread() -> None:
        is_over.wait(LIMIT_S)

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    try:
        save_stacks(tmp_path / "stacks", "rank 2, step 57\n")
    finally:
        is_over.set()
        thread.join()
    text = (tmp_path / "stacks").read_text()
    assert text.startswith("rank 2, step 57\n\n")
    assert "in in_another_thread" in text
    assert "in test_the_stacks_of_all_threads" in text


def test_a_process_that_is_stopped_or_gone_is_seen_as_that(child: subprocess.Popen[bytes]) -> None:
    process = process_of(child)
    child.send_signal(signal.SIGSTOP)
    wait_for_state(process, "T")
    assert in_words("T") == "is stopped (SIGSTOP)"
    assert describe(process).startswith(f"process {child.pid} is stopped (SIGSTOP)\n  thread {child.pid} ")
    child.kill()
    wait_for_state(process, GONE)
    assert "gone" in describe(process)


def test_children_are_described_too() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        deadline = time.monotonic() + LIMIT_S
        while "child " not in describe(process_of(parent)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert parent.stdin is not None
        parent.stdin.write(b"\n")


def test_of_another_machines_processes_nothing_is_said() -> None:
    far = replace(Process.current(), host="elsewhere", boot_id="another")
    assert state_of(far) is None
    assert describe(far) == f"process {os.getpid()}: can not be seen from here\n"


@pytest.mark.parametrize("state", ["R", "S", "D", "T", "t", "Z", "I"])
def test_every_state_has_words(state: str) -> None:
    assert in_words(state)


def test_the_last_collectives_are_saved_with_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json", raising=False)
    assert not save_flight_record(tmp_path / "record")
    assert not (tmp_path / "record").exists()
    record = json.dumps({"entries": [1]}).encode()
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda *_: record, raising=False)
    assert save_flight_record(tmp_path / "record")
    assert json.loads((tmp_path / "record").read_bytes()) == {"entries": [1]}
