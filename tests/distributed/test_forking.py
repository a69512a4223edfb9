"""Forked children that wait for a lock which no thread of theirs holds."""

from __future__ import annotations

import subprocess

import pytest

from tests import warm
from tests.waiting import HANG_LIMIT_S

#: The first ``argv[1]`` children stop, or die, where Python 3.11 may block: before a line of their own.
CHILDREN = """
import multiprocessing, os, sys, time
from hpc_train.training.distributed import forking
from hpc_train.training.distributed.forking import RunningContext

if not sys.argv[2:]:  # long for a child that is not blocked, on a busy machine
    forking.START_LIMITS_S = [0.5 if number < int(sys.argv[1]) else 30.0 for number in range(3)]
blocked = multiprocessing.Value("i", int(sys.argv[1]))
pids = multiprocessing.SimpleQueue()

def after_fork():
    pids.put(os.getpid())
    with blocked.get_lock():
        blocked.value -= 1
        is_blocked = blocked.value >= 0
    if is_blocked:
        os._exit(3) if sys.argv[2:] else time.sleep(1000)

os.register_at_fork(after_in_child=after_fork)
context = RunningContext()
receiver, sender = context.Pipe(duplex=False)
process = context.Process(target=sender.send, args=("runs",))
process.start()
process.join()
print(receiver.recv() if receiver.poll() else "died", process.exitcode, len(os.listdir("/proc/self/fd")))
while not pids.empty():
    pid = pids.get()
    assert pid == process.pid or not os.path.exists(f"/proc/{pid}"), "a child that was replaced is left"
"""


def run(num_blocked: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    with warm.start_script(
        CHILDREN, str(num_blocked), *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate(timeout=HANG_LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.fault(21)
def test_a_child_that_does_not_start_is_replaced() -> None:
    free, blocked = run(0), run(2)
    assert free.returncode == blocked.returncode == 0, blocked.stderr
    assert blocked.stdout.split()[:2] == ["runs", "0"]
    assert blocked.stdout == free.stdout, "no file stays open"
    assert blocked.stderr.count("is replaced") == 2


def test_after_some_children_starting_is_an_error() -> None:
    failed = run(3)
    assert failed.returncode == 1
    assert "RuntimeError: 3 child processes in a row did not start" in failed.stderr


def test_a_child_that_dies_before_its_first_line_is_not_replaced() -> None:
    done = run(1, "die")
    assert done.stdout.split()[:2] == ["died", "3"] and not done.stderr
