"""A command on a terminal of its own: what it writes there, and keys pressed for it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import HANG_LIMIT_S, came_true

_REPOSITORY = Path(__file__).parents[1]
_MOVES = re.compile(r"\x1b\[\d*;?\d*[Hf]")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>78]|\x1b\][^\x07]*\x07|\x1bP[^\x1b]*\x1b\\")
LEAVES_ALTERNATE_SCREEN, SHOWS_CURSOR = "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """``hpc-train`` with ``arguments`` on a terminal of 24 lines; as a context it ends the command."""

    def __init__(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str] = os.environ, columns: int = 80
    ) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train", *arguments],
            cwd=cwd,
            env={**environment, "TERM": "xterm-256color"},
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
        )
        os.set_blocking(self._ours, False)
        self._written = b""

    @property
    def written(self) -> str:
        """All that the command has written so far, escape sequences included."""
        with suppress(BlockingIOError):
            while part := os.read(self._ours, 1 << 16):
                self._written += part
        return self._written.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """The same without escape sequences; a move of the cursor begins a line."""
        return _ESCAPES.sub("", _MOVES.sub("\n", self.written))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, pattern: str, limit_s: float = HANG_LIMIT_S) -> None:
        """Wait until the text contains ``pattern``."""
        self.wait_for(lambda: re.search(pattern, self.text) is not None, pattern, limit_s)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = HANG_LIMIT_S) -> None:
        assert came_true(condition, limit_s), f"{what}: {self.text[-3000:]!r}"

    def wait(self, limit_s: float = HANG_LIMIT_S) -> int:
        """Wait until the command has ended; return its exit code."""

        def has_ended() -> bool:
            assert self.written is not None  # read: a full terminal blocks the command
            return self.process.poll() is not None

        self.wait_for(has_ended, "its end", limit_s)
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


def on_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """Return the output of a command on a terminal."""
    variables = os.environ | environment
    with Terminal(*arguments, cwd=_REPOSITORY, environment=variables, columns=columns) as terminal:
        assert terminal.wait() == 0
        return terminal.written
