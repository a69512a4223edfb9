"""``cancel`` and ``resume`` by key: the same commands, each as a separate process.

So the screen does not wait for them, and a resumed local run continues after the screen is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from hpc_train.console import one_line
from hpc_train.package_path import with_package
from hpc_train.paths import RunPaths
from hpc_train.run.processes import exit_code, start_in_own_session


class Command:
    """``hpc-train cancel RUN`` or ``hpc-train resume RUN``, started when it is made."""

    def __init__(self, words: str, paths: RunPaths, name: str) -> None:
        """``name``: the run's name in messages."""
        self.title = f"{words} {name}"
        # A file, not a pipe: the reader may have exited.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._read = 0
        self._last = ""
        self._process = start_in_own_session(  # the terminal's signals are for the screen
            [sys.executable, "-m", "hpc_train", words, str(paths.folder)],
            env=with_package(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
        )

    @property
    def pid(self) -> int:
        """Process id of the command, which may outlive the screen."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; its last lines may not have been read."""
        return exit_code(self._process) is not None

    def new_lines(self) -> list[str]:
        """Return its output since the last call, safe for a terminal."""
        is_over = self.is_over
        data = os.pread(self._output.fileno(), 1 << 16, self._read)
        end = len(data) if is_over else data.rfind(b"\n") + 1
        self._read += end
        lines = data[:end].decode("utf-8", "replace").splitlines()
        found = [one_line(line) for line in lines if line.strip()]
        self._last = found[-1] if found else self._last
        return found

    def end(self) -> str:
        """Return how it ended and its last line; close its output."""
        self._output.close()
        code = exit_code(self._process, block=True)
        return f"{self.title}: {'done' if code == 0 else f'exit code {code}'}; {self._last}".rstrip("; ")
