"""Child processes whose exit status something else has collected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpc_train.errors import ExitCode
from hpc_train.run.processes import exit_code

_IGNORING = """if True:
    import signal, subprocess, sys
    from hpc_train.run.processes import keep_exit_statuses
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    keep_exit_statuses()
    sys.exit(subprocess.run(["sh", "-c", "exit 7"]).returncode)
"""


@pytest.mark.parametrize("block", [False, True])
def test_a_lost_exit_status_is_a_failure(block: bool) -> None:
    child = subprocess.Popen(["true"])
    os.waitpid(child.pid, 0)
    assert exit_code(child, block=block) == ExitCode.FAILED


def test_an_exit_code_is_that_of_the_child() -> None:
    child = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
    assert exit_code(child) is None
    assert child.stdin is not None
    child.stdin.close()
    assert exit_code(child, block=True) == 7
    assert exit_code(child) == 7


def test_a_process_that_inherits_an_ignored_sigchld_gets_the_statuses_of_its_children() -> None:
    assert subprocess.run([sys.executable, "-c", _IGNORING], check=False).returncode == 7
