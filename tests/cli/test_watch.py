"""``watch`` on a real terminal, beside a run that trains; and where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hpc_train.run.run_status import read_status
from tests.cli.commands import REPOSITORY, hpc_train
from tests.end_to_end import paced
from tests.end_to_end.runs import PACED, end_what_is_left, found_runs, start, write_experiment
from tests.waiting import came_true

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>78]|\x1b\][^\x07]*\x07|\x1bP[^\x1b]*\x1b\\")
_LEAVES_ALTERNATE_SCREEN, _SHOWS_CURSOR = "\x1b[?1049l", "\x1b[?25h"


def test_without_a_terminal_status_is_named() -> None:
    done = hpc_train("watch")
    assert done.code == 2 and "hpc-train status" in done.err


class Watching:
    """A ``watch`` on a terminal of 80 × 24, and what it has written there."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train", "watch", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
        )
        os.set_blocking(self._ours, False)
        self.written = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def shows(self, pattern: str) -> bool:
        """Tell whether the text that was written so far contains it."""
        with suppress(BlockingIOError):
            self.written += os.read(self._ours, 1 << 16).decode("utf-8", "replace")
        return re.search(pattern, _ESCAPES.sub("", self.written)) is not None

    def until(self, pattern: str, limit_s: float = 60.0) -> None:
        """Wait until it is shown."""
        assert came_true(lambda: self.shows(pattern), limit_s), f"{pattern}: {self.written[-3000:]!r}"

    def has_ended(self) -> bool:
        self.shows("")
        return self.process.poll() is not None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@contextmanager
def _watching(*arguments: str, **environment: str) -> Iterator[Watching]:
    watching = Watching(*arguments, **environment)
    try:
        yield watching
    finally:
        watching.close()


@pytest.mark.slow
def test_a_run_is_watched_and_cancelled_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paced.TRAIN_S, "0.02")
    file = write_experiment(tmp_path, PACED)
    training = start("submit", file, "optimization.steps=5000", "device=cpu", "--local")
    try:
        with _watching("--interval", "1", NO_COLOR="1") as watching:
            watching.until(r"running .{9}\d+/5000 +\S+ +[▁-█]{10} \d")
            assert not re.search(r"\x1b\[[0-9;]*[34]8[;:]", watching.written), "NO_COLOR"
            watching.press("l")
            watching.until(r"rank-0\.log")
            watching.press("q")
            watching.press("c")
            watching.until("Cancel [0-9a-f]+ for good")
            watching.press("y")
            (paths,) = found_runs(tmp_path)
            watching.until("cancelled at step")
            watching.until("1 run: 1 cancelled")
            watching.press("q")
            assert came_true(watching.has_ended, 30)
            watching.shows("")
            assert watching.process.returncode == 0
            assert termios.tcgetattr(watching.theirs) == watching.before
            assert _LEAVES_ALTERNATE_SCREEN in watching.written and _SHOWS_CURSOR in watching.written
        assert read_status(paths).state == "cancelled"
        assert training.wait(30) != 0
    finally:
        end_what_is_left()


@pytest.mark.slow
def test_sigterm_restores_the_terminal() -> None:
    with _watching() as watching:
        watching.until("no runs yet")
        watching.process.terminate()
        assert came_true(watching.has_ended, 30)
        watching.shows("")
        assert termios.tcgetattr(watching.theirs) == watching.before
        assert _LEAVES_ALTERNATE_SCREEN in watching.written
