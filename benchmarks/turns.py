"""Runs several programs in turns of some seconds: one runs, the others are stopped.

The load of a shared machine changes over seconds, and with it the time of a step, by more than training loops
differ in. Programs that take turns run under the same load; those that run one after the other do not.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from hpc_train.training.distributed.forking import RunningContext

#: Long compared with a step of most models (0.3 s), short compared with changes of the machine's load.
TURN_S = 2.0
#: What takes longer than the median by this share of a turn contained a turn of another program.
_SHARE = 0.9


def undisturbed(times: Sequence[float], window: int, turn_s: float = TURN_S) -> float:
    """Return the median of seconds per step, without the windows of steps in which the program was stopped.

    ``window``: steps of each time.
    """
    limit_s = statistics.median(times) + _SHARE * turn_s / window
    return statistics.median(time for time in times if time < limit_s)


def by_turns(arms: Mapping[str, Callable[[], float]], turn_s: float = TURN_S) -> dict[str, float]:
    """Run every arm in a process of its own until all have returned; return their values.

    Turns are taken in random order. Raises RuntimeError with the traceback of an arm that fails.
    """
    context = RunningContext()
    values: dict[str, float] = {}
    programs: dict[str, tuple[Any, Connection]] = {}
    try:
        for arm, run in arms.items():
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(run, sender), name=arm)
            with sender, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which an arm does not use
                process.start()
            send(process.pid, signal.SIGSTOP)
            programs[arm] = (process, receiver)
        while programs:
            for arm in random.sample(list(programs), len(programs)):
                process, receiver = programs[arm]
                send(process.pid, signal.SIGCONT)
                if not receiver.poll(turn_s):
                    send(process.pid, signal.SIGSTOP)
                    continue
                values[arm] = _received(arm, receiver)
                process.join()
                del programs[arm]
    finally:
        for process, _ in programs.values():
            send(process.pid, signal.SIGKILL)
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


def send(pid: int | None, number: signal.Signals) -> None:
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
