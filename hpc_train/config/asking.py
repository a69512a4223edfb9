"""A child process that is asked line by line: it takes seconds to begin, and then answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Timer


class Child:
    """``python -m MODULE``, which answers each line of its input by one of its output.

    Begun at the first question, and anew where it has ended.
    """

    def __init__(self, module: str) -> None:
        self._command = [sys.executable, "-m", module]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, limit_s: float) -> bytes:
        """Return the line that answers. Raises CalledProcessError where none comes in time, or OSError."""
        if self._process is None or self._process.poll() is not None:
            self._begin()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        limit = Timer(limit_s, process.kill)
        limit.start()
        try:
            process.stdin.write(f"{question}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, with an answer or without
        finally:
            answer = process.stdout.readline()
            limit.cancel()
        if not answer:
            process.wait()
            self._errors.seek(0)
            raise subprocess.CalledProcessError(process.returncode, self._command, stderr=self._errors.read())
        return answer

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _begin(self) -> None:
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would fill)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment()
        )


def environment() -> dict[str, str]:
    """Return what a child that imports torch is started with: this package, and no GPU."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
