"""Ctrl-C, and the launcher's own death."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest
from hpc_train.recovery.history import current_status
from hpc_train.run.liveness import end_living
from hpc_train.run.run_status import read_status
from tests.launchers.fake_ranks import new_request, record_of, start_launcher, told, wait_for
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

SAVE_AND_STOP = """
flag = signals.install()
tell("ready")
wait_for(lambda: flag)
print(flag.first.name, flag.count)
sys.exit(75)
"""
STUBBORN = """
flag = signals.install()
tell("ready")
wait_for(lambda: flag)
tell("noted")
wait_for(lambda: False)
"""


def ready(folder: Path, script: str) -> tuple[LaunchRequest, subprocess.Popen[str]]:
    """Start a launcher of two ranks and wait until both are ready."""
    request = new_request(folder)
    launcher = start_launcher(request, script)
    wait_for(told(request, "ready"))
    return request, launcher


@contextmanager
def handled(number: signal.Signals, how: signal.Handlers) -> Iterator[None]:
    """Handle the signal so in what is started meanwhile."""
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


def end(launcher: subprocess.Popen[str]) -> int:
    try:
        launcher.communicate(timeout=HANG_LIMIT_S)
    finally:
        launcher.kill()
        launcher.communicate()
    return launcher.returncode


def logs(request: LaunchRequest) -> list[str]:
    attempt = request.paths.attempt(request.attempt)
    return [attempt.log(rank).read_text() for rank in range(request.devices or 1)]


@pytest.mark.fault(47)
def test_ctrl_c_lets_ranks_save(tmp_path: Path) -> None:
    request, launcher = ready(tmp_path, SAVE_AND_STOP)
    launcher.send_signal(signal.SIGINT)
    assert end(launcher) == ExitCode.INTERRUPTED
    assert logs(request) == ["SIGTERM 1\n"] * 2
    status = read_status(request.paths)
    assert (status.state, status.reason) == ("interrupted", "stopped by Ctrl-C")
    assert record_of(request).exit_codes == [75, 75]


def test_sigterm_to_the_launcher_is_ctrl_c(tmp_path: Path) -> None:
    _, launcher = ready(tmp_path, SAVE_AND_STOP)
    launcher.terminate()
    assert end(launcher) == ExitCode.INTERRUPTED


def test_a_lost_terminal_is_ctrl_c_unless_hangups_are_ignored(tmp_path: Path) -> None:
    with handled(signal.SIGHUP, signal.SIG_DFL):  # the tests may run under nohup
        _, launcher = ready(tmp_path, SAVE_AND_STOP)
    launcher.send_signal(signal.SIGHUP)
    assert end(launcher) == ExitCode.INTERRUPTED

    with handled(signal.SIGHUP, signal.SIG_IGN):
        script = "tell('ready'); wait_for((run.folder / 'go').exists)"
        request, launcher = ready(tmp_path / "nohup", script)
    launcher.send_signal(signal.SIGHUP)
    (request.paths.folder / "go").touch()
    assert end(launcher) == ExitCode.DONE


def test_ctrl_c_counts_in_a_scripts_background_job_too(tmp_path: Path) -> None:
    with handled(signal.SIGINT, signal.SIG_IGN):
        _, launcher = ready(tmp_path, SAVE_AND_STOP)
    launcher.send_signal(signal.SIGINT)
    assert end(launcher) == ExitCode.INTERRUPTED


@pytest.mark.fault(47)
def test_a_second_ctrl_c_ends_ranks_at_once(tmp_path: Path) -> None:
    request, launcher = ready(tmp_path, STUBBORN)
    launcher.send_signal(signal.SIGINT)
    wait_for(told(request, "noted"))
    launcher.send_signal(signal.SIGINT)
    assert end(launcher) == ExitCode.INTERRUPTED
    assert record_of(request).exit_codes == [-9, -9]
    assert read_status(request.paths).reason == "stopped by Ctrl-C"


def test_a_failure_while_stopping_is_reported_as_such(tmp_path: Path) -> None:
    script = SAVE_AND_STOP.replace(
        "sys.exit(75)", "fail('the disk is full', 74) if rank == 1 else sys.exit(76)"
    )
    request, launcher = ready(tmp_path, script)
    launcher.send_signal(signal.SIGINT)
    assert end(launcher) == ExitCode.IO
    assert read_status(request.paths).reason == "the disk is full"


@pytest.mark.fault(3)
def test_ctrl_c_during_a_ranks_imports_is_honoured(tmp_path: Path) -> None:
    request = new_request(tmp_path)
    script = (
        """
tell("importing")
wait_for(lambda: signal.SIGTERM in signal.sigpending())
"""
        + SAVE_AND_STOP
    )
    launcher = start_launcher(request, script)
    wait_for(told(request, "importing"))
    launcher.send_signal(signal.SIGINT)
    assert end(launcher) == ExitCode.INTERRUPTED
    assert record_of(request).exit_codes == [75, 75]


@pytest.mark.fault(48)
def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    request, launcher = ready(tmp_path, STUBBORN)
    wait_for(lambda: record_of(request).rank_processes)
    ranks = record_of(request).rank_processes
    assert [rank.is_alive() for rank in ranks] == [True, True]
    assert end_living(request.paths) is not None
    launcher.kill()
    end(launcher)
    wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    assert end_living(request.paths) is None
    assert current_status(request.paths).reason == "launcher died"
