"""A child process that answers questions line by line: it takes seconds to start, then answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import NoReturn

from hpc_train.package_path import PACKAGE_PARENT, answer_in, with_package


class Child:
    """``python -m MODULE``, which answers each line of its input with a JSON object in one line.

    Started at the first question, and restarted if it has ended.
    """

    def __init__(self, module: str) -> None:
        self._command = [sys.executable, "-m", module]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, limit_s: float) -> bytes:
        """Return the answer line. Raises SubprocessError if none arrives in time; OSError."""
        if self._process is None or self._process.poll() is not None:
            self._begin()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        begun = time.monotonic()
        limit = Timer(limit_s, process.kill)
        try:
            limit.start()
            with suppress(BrokenPipeError):  # it has ended, with or without an answer
                process.stdin.write(f"{question}\n".encode())
                process.stdin.flush()
            answer = process.stdout.readline()
            while answer and answer_in(answer) is None:  # printed by a site's Python as it starts
                answer = process.stdout.readline()
        finally:  # also at Ctrl-C: the interpreter would wait for the timer
            limit.cancel()
        if not answer:
            self._fail(process.wait(), limit_s, is_late=time.monotonic() - begun >= limit_s)
        return answer

    def close(self) -> None:
        """Terminate it immediately."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _fail(self, code: int, limit_s: float, *, is_late: bool) -> NoReturn:
        if is_late:
            raise subprocess.TimeoutExpired(self._command, limit_s)
        self._errors.seek(0)
        raise subprocess.CalledProcessError(code, self._command, stderr=self._errors.read())

    def _begin(self) -> None:
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would fill)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment()
        )


def environment() -> dict[str, str]:
    """Return the environment of a child that imports torch: this package, the user's modules, and no GPU."""
    return with_package(os.environ, (PACKAGE_PARENT, str(Path.cwd()))) | {"CUDA_VISIBLE_DEVICES": ""}
