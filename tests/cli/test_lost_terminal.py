"""The reader of the output may leave at any time; the run continues, or saves and stops."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.checkpoints import committed
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import RunStatus, read_status
from tests.cli.commands import REPOSITORY
from tests.cli.launchers import SCRIPTED
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import EXPERIMENT, hpc_train, installed, wait_for
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

_LIMIT_S = HANG_LIMIT_S


def _own_terminal() -> None:
    """Make stdin, a terminal, that of this new session: closing it sends SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.setsid()
    ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def _on_a_terminal(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_train", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=_own_terminal,  # noqa: PLW1509  (three system calls)
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):
            os.close(ours)


def _the_run() -> RunPaths | None:
    found = [path.parent for path in runs_root().glob("*/[!.]*/run.json")]
    return RunPaths(found[0]) if found else None


def _wait_for(
    condition: Callable[[RunPaths], bool],
    what: str,
    process: subprocess.Popen[bytes],
    ours: int | None = None,
) -> RunPaths:
    """Wait for it, reading the terminal meanwhile: a full one would hold the command up."""

    def is_met() -> bool:
        if ours is not None:
            os.set_blocking(ours, False)
            with suppress(OSError):
                os.read(ours, 65536)
        assert process.poll() is None, "the command has ended"
        run = _the_run()
        return run is not None and condition(run)

    wait_for(is_met, what, _LIMIT_S)
    run = _the_run()
    assert run is not None
    return run


def _state(run: RunPaths) -> tuple[str, str | None]:
    now = read_status(run)
    return now.state, now.reason


def test_the_shells_hangup_after_the_kernels_does_not_end_ranks_at_once(file: Path) -> None:
    with _on_a_terminal("submit", file, "--launcher", SCRIPTED) as (process, ours):
        run = _wait_for(lambda run: (run.folder / "ready").exists(), "the rank", process, ours)
        rank = newest_record(run)
        wait_for(lambda: bool((newest_record(run) or rank).rank_processes), "its number")  # type: ignore[union-attr]
        rank = newest_record(run)
        assert rank is not None
        os.kill(rank.rank_processes[0].pid, signal.SIGSTOP)  # it has not saved before both have come
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: _pending_hangups(process.pid) == 0, "the signal's arrival")
        os.kill(rank.rank_processes[0].pid, signal.SIGCONT)
        process.wait(_LIMIT_S)
    assert (run.folder / "saved").exists()
    assert _state(run) == ("interrupted", "stopped by SIGHUP")
    record = newest_record(run)
    assert record is not None and record.exit_codes == [75]


def _pending_hangups(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return sum(mask >> (signal.SIGHUP - 1) & 1 for mask in pending)


@pytest.mark.parametrize("both", [True, False])
def test_a_reader_that_goes_away_does_not_end_the_run(file: Path, both: bool) -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_train", "submit", file, "--launcher", SCRIPTED],
        cwd=REPOSITORY,
        env=os.environ,
        stdout=write if both else subprocess.DEVNULL,
        stderr=write,
    )
    os.close(write)
    try:
        run = _wait_for(lambda run: (run.folder / "ready").exists(), "the rank", process)
        os.close(read)
        row = '{"attempt": 1, "split": "val", "step": 1, "loss": 0.5}\n'  # makes a line to be said
        run.metrics.write_text(row)
        (run.folder / "go").touch()
        code = process.wait(_LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert read_status(run) == RunStatus("completed", 9, 9, attempt=1)
    record = newest_record(run)
    assert record is not None and record.exit_codes == [0]
    assert code == (74 if both else 0)  # what was to be on stdout could not be


@pytest.mark.slow
def test_a_closed_terminal_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed()), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "exp.yaml"
    steps = ("optimization.steps=40", "checkpoint.every_steps=1000", "device=cpu")
    file.write_text(EXPERIMENT)
    with (
        Hold(tmp_path, 3) as hold,
        _on_a_terminal("submit", file, *steps, hold.override, "--local", "--devices", "2") as (process, ours),
    ):
        run = _wait_for(lambda run: hold.is_reached(), "step 3", process, ours)
        os.close(ours)
        process.wait(_LIMIT_S)
    assert _state(run) == ("interrupted", "stopped by SIGHUP")
    assert committed(run)[0].step == read_status(run).step >= 3
    done = hpc_train("resume", run.folder)
    assert done.code == 0, done.err
    assert read_status(run).state == "completed"
