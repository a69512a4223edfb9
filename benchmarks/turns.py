"""Runs programs at the same time, but one at a time: each for a second or two, while the others are stopped.

Programs that run one after the other meet a shared machine at different moments, and its load changes a step
by more than the loops differ in. Of programs that take turns each meets the same.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

#: Of a program's steps. Long beside a step of the largest model (0.2 s), short beside the machine's moods.
TURN_S = 2.0
#: A step that takes longer than this times the median was interrupted by other programs' turns.
_INTERRUPTED = 1.5


def undisturbed(times: Sequence[float]) -> float:
    """Return the median without the steps that were stopped meanwhile."""
    most = _INTERRUPTED * statistics.median(times)
    return statistics.median(time for time in times if time <= most)


def by_turns(arms: Mapping[str, Callable[[], float]], turn_s: float = TURN_S) -> dict[str, float]:
    """Run every arm in a process of its own until all have returned; return their values.

    Turns are taken in random order. Raises RuntimeError with the traceback of an arm that fails.
    """
    context = multiprocessing.get_context("fork")
    values: dict[str, float] = {}
    programs: dict[str, tuple[Any, Connection]] = {}
    try:
        for arm, run in arms.items():
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(run, sender), name=arm)
            process.start()
            sender.close()
            _signal(process.pid, signal.SIGSTOP)
            programs[arm] = (process, receiver)
        while programs:
            for arm in random.sample(list(programs), len(programs)):
                process, receiver = programs[arm]
                _signal(process.pid, signal.SIGCONT)
                if not receiver.poll(turn_s):
                    _signal(process.pid, signal.SIGSTOP)
                    continue
                values[arm] = _received(arm, receiver)
                process.join()
                del programs[arm]
    finally:
        for process, _ in programs.values():
            _signal(process.pid, signal.SIGKILL)
            process.join()
    return {arm: values[arm] for arm in arms}


def _send(run: Callable[[], float], sender: Connection) -> None:
    try:
        sender.send(run())
    except BaseException:
        sender.send(traceback.format_exc())


def _received(arm: str, receiver: Connection) -> float:
    try:
        value = receiver.recv()
    except EOFError:
        value = "it was killed"
    if isinstance(value, str):
        raise RuntimeError(f"{arm}: {value}")
    return float(value)


def _signal(pid: int | None, number: signal.Signals) -> None:
    """Send the signal to a process and all that come from it, whatever their session."""
    assert pid is not None
    reached: set[int] = set()
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(pid)
        # Again, for those that were started before their parent was stopped.
        while new := {pid, *(child.pid for child in program.children(recursive=True))} - reached:
            for each in new:
                with suppress(ProcessLookupError):
                    os.kill(each, number)
            reached |= new
