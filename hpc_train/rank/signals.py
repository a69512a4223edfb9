"""Stop signals of a rank: recorded in a flag, handled at the end of a step.

A launcher blocks them between fork and exec, so that none is lost or kills a rank while Python imports.
Python calls handlers in the main thread, which may be inside a library for minutes: on a GPU, autograd
compiles the backward graph in a separate thread while the main thread waits in C++. For signals that must act
at once, another thread acts instead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import popen_fork
from types import FrameType

from hpc_train.run.attempts import now_ms

#: Ctrl-C, scancel or preemption, Slurm's warning of the time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
#: Time for the main thread to act on a signal before another thread does (assumed).
_MAIN_THREAD_S = 3.0


@dataclass
class StopFlag:
    """The first stop signal of this process, its time, and the number of signals."""

    first: signal.Signals | None = None
    #: UTC, ISO 8601.
    first_at: str | None = None
    count: int = 0
    #: Seconds since 1970; SIGUSR2 counts from then on. With a shortened time limit the warning may come
    #: before anything could be trained.
    no_warning_before: float = 0.0
    #: Sends the early warning again.
    later: threading.Timer | None = None
    #: Called at once on a signal; None if only the training loop checks the flag.
    act: Callable[[], None] | None = None
    #: True until the first step: a rank with a stop signal may exit at once, and then so may its peers.
    may_exit_early: bool = True
    #: The descriptor to which the interpreter writes the number of each signal while ``act`` is set.
    wakeup: int | None = None

    def __bool__(self) -> bool:
        return self.count > 0

    def note(self, number: int) -> None:
        """Record a signal, or resend an early warning later; called by the handler."""
        if number == signal.SIGUSR2 and (left_s := self.no_warning_before - time.time()) > 0:
            if self.later is None:
                self.later = threading.Timer(left_s, os.kill, (os.getpid(), number))
                self.later.daemon = True
                self.later.start()
            return
        if self.first is None:
            self.first, self.first_at = signal.Signals(number), now_ms()
        self.count += 1
        if self.act is not None:
            self.act()

    def act_at_once(self, act: Callable[[], None] | None) -> None:
        """Call ``act`` on signals, including an earlier one; None: only record them.

        Main thread only. ``act`` may be called by another thread.
        """
        self.act = act
        if self.wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self.wakeup)  # ends the thread
            self.wakeup = None
        if act is None:
            return
        if self:
            act()
        reader, self.wakeup = os.pipe()
        os.set_blocking(self.wakeup, False)
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        with blocked():
            threading.Thread(
                target=self._handle_late_signals, args=(reader,), name="signals", daemon=True
            ).start()

    def _handle_late_signals(self, reader: int) -> None:
        """Handle signals that the main thread does not handle in time."""
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in STOP_SIGNALS:
                    time.sleep(_MAIN_THREAD_S)
                    if self.act is not None and not self:
                        self.note(number[0])


# A forked child must not report its signals to its parent.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
#: ``terminate`` of a child process before ``install`` replaces it.
_send_sigterm = popen_fork.Popen.terminate
#: By process ID, because a forked child inherits its parent's flag.
_flags: dict[int, StopFlag] = {}


def block() -> None:
    """Block the stop signals of this thread and its children until ``install``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def blocked() -> Iterator[None]:
    """Block the stop signals of this thread, and of threads and processes that it starts in the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def install(no_warning_before: float = 0.0) -> StopFlag:
    """Record stop signals, including pending ones that were blocked; return the flag.

    SIGUSR2 counts from ``no_warning_before`` on, in seconds since 1970.

    Main thread only. Further calls in the same process return the same flag. A forked child inherits the
    handler, which does nothing there, because Slurm sends the signals to all processes of a job.
    ``terminate`` of such a child, which ``multiprocessing.Pool`` calls at its end, therefore kills it.
    """
    pid = os.getpid()
    if pid not in _flags:
        flag = _flags[pid] = StopFlag(no_warning_before=no_warning_before)

        def note(number: int, frame: FrameType | None) -> None:
            if os.getpid() == pid:
                flag.note(number)

        for number in STOP_SIGNALS:
            signal.signal(number, note)
    popen_fork.Popen.terminate = _terminate  # type: ignore[method-assign, assignment]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return _flags[pid]


def _terminate(child: popen_fork.Popen) -> None:
    """End a child process that ignores SIGTERM if it was forked."""
    if child.method == "fork":
        child.kill()
    else:
        _send_sigterm(child)
