"""Signals that ask a rank to stop: noted in a flag, acted on at the end of a step.

A launcher blocks them between fork and exec, so that none is lost or kills a rank while Python imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from hpc_train.run_folder.attempts import now_ms

#: Ctrl-C, scancel or preemption, Slurm's warning of the time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@dataclass
class StopFlag:
    """Whether somebody asked this process to stop: which signal came first, when, and how many came."""

    first: signal.Signals | None = None
    #: UTC, ISO 8601.
    first_at: str | None = None
    count: int = 0
    #: What a signal does at once, besides being noted; None where the loop acts on the flag.
    act: Callable[[], None] | None = None
    #: Until the first step: whoever is asked to stop may leave, and so may those that it leaves behind.
    has_nothing_to_lose: bool = True

    def __bool__(self) -> bool:
        return self.count > 0

    def note(self, number: int) -> None:
        if self.first is None:
            self.first, self.first_at = signal.Signals(number), now_ms()
        self.count += 1
        if self.act is not None:
            self.act()

    def act_at_once(self, act: Callable[[], None] | None) -> None:
        """Let signals, one that has come already included, do ``act``; None: noting is enough again."""
        self.act = act
        if act is not None and self:
            act()


#: By process: a forked child inherits what its parent noted here.
_flags: dict[int, StopFlag] = {}


def block() -> None:
    """Hold back the stop signals of this thread, and of what it starts, until ``install``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def install() -> StopFlag:
    """Note stop signals from now on, those held back until now included; return the flag.

    Main thread only. Called again in the same process it returns the same flag. A forked child inherits
    the handler, which does nothing there.
    """
    pid = os.getpid()
    if pid not in _flags:
        flag = _flags[pid] = StopFlag()

        def note(number: int, frame: FrameType | None) -> None:
            if os.getpid() == pid:
                flag.note(number)

        for number in STOP_SIGNALS:
            signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return _flags[pid]
