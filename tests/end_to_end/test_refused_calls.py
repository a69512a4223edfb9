"""Runs train and resume, bitwise equal, if a file system or a container refuses system calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    hpc_train,
    kill_everything,
    only_run,
    start,
    write_experiment,
)
from tests.quiet import QuietRuns
from tests.refused_calls import IS_POSSIBLE, prefix
from tests.warm import FRESH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_POSSIBLE, reason="system calls are refused by number, on Linux on x86-64"),
]

SHORT = ("optimization.schedule={name: constant}", "optimization.steps=5", "data.workers=1")
#: Their semaphores are links in /dev/shm, which has them.
NO_LOADER_PROCESSES = "data.workers=0"
#: Error → calls that file systems (vfat, CIFS, FUSE, object stores) and containers refuse with it.
GROUPS = {
    "permissions": ("EPERM", "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utimensat"),
    "links": ("EPERM", "link linkat symlink symlinkat mknod mknodat"),
    "sync": ("EINVAL", "fsync fdatasync sync_file_range syncfs sync msync"),
    "space": ("EOPNOTSUPP", "fallocate flock setxattr getxattr listxattr fadvise64 statfs fstatfs"),
    "new": ("ENOSYS", "copy_file_range splice sendfile statx renameat2 memfd_create close_range pidfd_open"),
    "processes": ("EPERM", "setpriority sched_setaffinity mlock mlockall membarrier pidfd_send_signal"),
    "container": ("EPERM", "get_mempolicy set_mempolicy mbind inotify_init1 io_uring_setup perf_event_open"),
}
#: With this variable, as ``make test-full`` sets it, each call is refused on its own.
CASES = (
    [(name, error, [call]) for name, (error, calls) in GROUPS.items() for call in calls.split()]
    if os.environ.get("HPC_TRAIN_ALL_PARALLEL")
    else [(name, error, calls.split()) for name, (error, calls) in GROUPS.items()]
)


@pytest.mark.parametrize(
    ("name", "error", "calls"), CASES, ids=[f"{name}-{calls[0]}" for name, _, calls in CASES]
)
def test_a_run_does_without_calls_that_may_be_refused(
    name: str, error: str, calls: list[str], quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    overrides = (*SHORT, NO_LOADER_PROCESSES) if name == "links" else SHORT
    quiet = quiet_runs.of(*overrides, ranks=1)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), FRESH: "1"}
    local = ("--local", "--devices", "1")
    with Hold(tmp_path, 3) as hold:
        command = ("submit", write_experiment(tmp_path), *overrides, *local, hold.override)
        process = start(*command, before=prefix(calls, error), **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        kill_everything(process, paths)
        process.communicate()
    done = hpc_train("resume", paths.folder, before=prefix(calls, error), **runs)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert_equal_to_the_bit(quiet, paths)
