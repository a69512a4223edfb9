"""Runs train and resume, bitwise equal, if a file system or a container refuses system calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from tests.refused_calls import IS_POSSIBLE, prefix_of
from tests.warm import FRESH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_POSSIBLE, reason="system calls are refused by number, on Linux on x86-64"),
]

SHORT = ("optimization.schedule={name: constant}", "optimization.steps=5")
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
_Groups = list[tuple[list[str], str]]
_ALL = {name: (calls.split(), error) for name, (error, calls) in GROUPS.items()}
#: Semaphores of loader processes are links in /dev/shm, which has them.
_ALL_BUT_LINKS = [group for name, group in _ALL.items() if name != "links"]


def cases() -> Iterator[tuple[str, int, _Groups]]:
    """Yield name, loader processes, and what is refused: all calls at once, or, with the variable that
    ``make test-full`` sets, each on its own.
    """
    if not os.environ.get("HPC_TRAIN_ALL_PARALLEL"):
        yield "all", 0, list(_ALL.values())
        yield "all-but-links", 1, _ALL_BUT_LINKS
        return
    for name, (calls, error) in _ALL.items():
        for call in calls:
            yield f"{name}-{call}", int(name != "links"), [([call], error)]


CASES = list(cases())


@pytest.mark.parametrize(
    ("workers", "refused"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_run_does_without_calls_that_may_be_refused(
    workers: int, refused: _Groups, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    overrides = (*SHORT, f"data.workers={workers}")
    quiet, before = quiet_runs.of(*overrides, ranks=1), prefix_of(refused)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), FRESH: "1"}
    local = ("--local", "--devices", "1")
    with Hold(tmp_path, 3) as hold:
        command = ("submit", write_experiment(tmp_path), *overrides, *local, hold.override)
        process = start(*command, cwd=None, before=before, **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        kill_everything(process, paths)
        process.communicate()
    done = hpc_train("resume", paths.folder, cwd=None, before=before, **runs)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert_equal_to_the_bit(quiet, paths)
