"""Child processes whose exit status something else has collected."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.cli import app
from hpc_train.errors import ExitCode
from hpc_train.launchers.entry import Entry
from hpc_train.launchers.rank_processes import RankProcess, RankProcesses
from hpc_train.rank import signals
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


@pytest.fixture
def ignores_children() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


class _StartedError(Exception):
    """Ends a program once it has set itself up."""


def _stop() -> None:
    raise _StartedError


@pytest.mark.usefixtures("ignores_children")
@pytest.mark.parametrize("program", [app.main, Entry(Path("run"))])
def test_children_have_exit_statuses(program: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    umask, threshold = os.umask(0o022), gc.get_threshold()
    monkeypatch.setattr(app, "app", _stop)
    monkeypatch.setattr(signals, "block", _stop)
    with pytest.raises(_StartedError):
        program()
    os.umask(umask)
    gc.set_threshold(*threshold)
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL


def test_a_rank_whose_status_was_lost_has_failed() -> None:
    rank = RankProcess(0, subprocess.Popen(["true"]))
    os.waitpid(rank.popen.pid, 0)
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._all, ranks.ended = [rank], []
    ranks.collect()
    assert ranks.exit_codes() == [ExitCode.FAILED]
