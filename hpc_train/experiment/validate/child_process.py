"""A child process that calls functions which need torch, for commands that don't import it: both its ends.

``Child.call`` sends ``{"call": "module:function", "arguments": […]}`` as a line of JSON; ``main``, in the
child, answers each line with ``{"result": …}`` or, for a user's mistake, ``{"error": …}``. The child takes
seconds to start, then answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError, printable
from hpc_train.package_path import PACKAGE_PARENT, answer_in, with_package


class ChildError(Exception):
    """A call has no result: the function refused, or the child failed or did not answer in time."""


class Child:
    """Started at the first call, and restarted if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: str, *arguments: Any, limit_s: float) -> Any:
        """Return the result of ``module:function``; arguments and result are JSON. Raises ChildError."""
        question = json.dumps({"call": function, "arguments": arguments})
        try:
            answer = self._answer(question, limit_s)
        except (OSError, subprocess.SubprocessError) as error:
            # The child's last line says why it failed.
            lines = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), str(error))
            raise ChildError(printable(reason)) from error
        if "result" not in answer:
            raise ChildError(answer.get("error", "no answer"))
        return answer["result"]

    def close(self) -> None:
        """Terminate it immediately."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _answer(self, question: str, limit_s: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._begin()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        begun = time.monotonic()
        limit = threading.Timer(limit_s, process.kill)
        try:
            limit.start()
            with suppress(BrokenPipeError):  # it has ended, with or without an answer
                process.stdin.write(f"{question}\n".encode())
                process.stdin.flush()
            for line in process.stdout:
                # A site's Python may print as it starts.
                if (answer := answer_in(line)) is not None:
                    return answer
        finally:  # also at Ctrl-C: the interpreter would wait for the timer
            limit.cancel()
        code = process.wait()
        if time.monotonic() - begun >= limit_s:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        self._errors.seek(0)
        raise subprocess.CalledProcessError(code, process.args, stderr=self._errors.read())

    def _begin(self) -> None:
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would fill)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train.experiment.validate.child_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # This package, the user's modules, and no GPU.
            env=with_package(os.environ, (PACKAGE_PARENT, str(Path.cwd()))) | {"CUDA_VISIBLE_DEVICES": ""},
        )


class _Shared(threading.local):
    """The child of ``one_child``, of this thread: two threads can't use one child at the same time."""

    child: Child | None = None


_shared = _Shared()


@contextmanager
def one_child() -> Iterator[Child]:
    """Within this context, which may be nested, the same child answers all calls."""
    if _shared.child is not None:
        yield _shared.child
        return
    try:
        with closing(Child()) as _shared.child:
            yield _shared.child
    finally:
        _shared.child = None


def main() -> None:
    """Answer every line of standard input; any error that is not a user's mistake ends the child."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a model may print
    for line in sys.stdin:
        question = json.loads(line)
        module, _, function = question["call"].partition(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), function)(*question["arguments"])}
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
