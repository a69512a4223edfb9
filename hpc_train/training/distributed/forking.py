"""Forks child processes of a rank and ensures that they run.

A fork copies the locks of all threads of the process, but only the thread that forks. C++ threads, such as
gloo's, enter the interpreter at any time; in Python 3.11 a child that is forked at that moment deadlocks on
the interpreter's list of threads, before its first line (``PyOS_AfterFork_Child``; observed about once in
1,000 forks on a busy machine). Therefore a child reports that it runs, and is replaced if it does not.

``ForkedCall`` runs a function in such a child, with whose end its side effects end. ``training.prepare`` and
``training.flops`` run the user's code on the meta device; in this process, tensors that the code caches would
stay on that device.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import torch

from hpc_train.run import processes

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
                poll = select.poll()  # unlike select, it supports descriptors above 1,023
                poll.register(reader, select.POLLIN)
                if poll.poll(limit_s * 1000):  # also if the child has died: the caller notices
                    return
            finally:
                os.close(reader)
            _log.warning("a child process did not start within %g s and is replaced", limit_s)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            assert self.finalizer is not None
            self.finalizer()
        raise RuntimeError(f"{len(START_LIMITS_S)} child processes in a row did not start")


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


class ForkedCall:
    """A call that runs in a child of this process and ends with it. The child's output is dropped.

    On a GPU the call may run a backward pass only if this process has run none: autograd's threads are not
    forked.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        context = RunningContext()
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_call, args=(function, sender, os.getpid()), daemon=True)
        with sender, warnings.catch_warnings():
            # Python 3.12 warns about threads; the child has none, and calls nothing that waits for one.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Return True if the result has arrived or the child has died, or either happens within this time."""
        return self._receiver.poll(within_s)

    def result(self) -> Any:
        """Wait for the function's result; None if it raised or the child died. Call it once."""
        try:
            return self._receiver.recv()
        except EOFError:
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the child if it is still running. May be called again."""
        if not self._receiver.closed:
            self._receiver.close()
            self._process.kill()
            self._process.join()


def _run_call(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    processes.die_with(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the model may print, and will again when it is used
        os.dup2(nowhere, stream)
    try:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not forked
        sender.send(function())
    finally:
        os._exit(0)
