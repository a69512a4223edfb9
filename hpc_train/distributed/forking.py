"""Forks child processes of a rank and ensures that they run.

A fork copies the locks of all threads of the process, but only the thread that forks. C++ threads, such as
gloo's, enter the interpreter at any time; in Python 3.11 a child that is forked at that moment deadlocks on
the interpreter's list of threads, before its first line (``PyOS_AfterFork_Child``; observed about once in
1,000 forks on a busy machine). Therefore a child reports that it runs, and is replaced if it does not.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

#: Timeouts for the report of the first child, the second and so on. Assumed: a child that is not blocked
#: needs milliseconds, but the machine may be busy.
START_LIMITS_S = (5.0, 15.0, 60.0)
_log = logging.getLogger(__name__)


class _RunningPopen(Popen):
    """Returns once the child runs."""

    def _launch(self, process_obj: Any) -> None:
        for limit_s in START_LIMITS_S:
            reader, process_obj.report = os.pipe()
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # typeshed has no private names
            finally:  # in the parent: the child never leaves _launch
                os.close(process_obj.report)
            try:
                if _is_readable(reader, limit_s):  # also if the child has died: the caller notices
                    return
            finally:
                os.close(reader)
            _log.warning("a child process did not start within %g s and is replaced", limit_s)
            self._discard()
        raise RuntimeError(f"{len(START_LIMITS_S)} child processes in a row did not start")

    def _discard(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        assert self.finalizer is not None
        self.finalizer()


def _is_readable(descriptor: int, within_s: float) -> bool:
    poll = select.poll()  # unlike select, it supports descriptors above 1,023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


class RunningProcess(ForkProcess):
    """A forked process; ``start`` returns once it runs. Raises RuntimeError if no child starts."""

    #: The write end of a pipe on which the child reports.
    report: int

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802  (multiprocessing's name)
        return _RunningPopen(process_obj)

    def run(self) -> None:
        """Report to the parent that the child runs, then call its target."""
        os.write(self.report, b"\0")
        os.close(self.report)
        super().run()


class RunningContext(ForkContext):
    """The context of ``multiprocessing.get_context("fork")``, with children that have reported."""

    Process = RunningProcess
