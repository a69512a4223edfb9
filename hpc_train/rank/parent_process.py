"""Processes that end with their parent, and the end of those below this process, daemons included."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import ExitCode

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: For killed processes to end: one in a system call of a dead file server may not.
_END_LIMIT_S = 10.0
_POLL_S = 0.01


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its ``parent`` ends, for whatever reason.

    Called by the child. Exits at once if the parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before prctl
        os._exit(int(ExitCode.PEER_LOST))


def end_daemons() -> None:
    """Kill daemonic children; call it before ``os._exit``, which does not end them."""
    with suppress(Exception):  # another thread may be starting one
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parents end, daemons included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(child: int) -> None:
    """Collect adopted processes that have ended; ``child``: the process whose exit status is kept."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def children_by_parent() -> dict[int, list[int]]:
    """Return the processes of this machine by their parents, zombies excluded."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in {"Z", "X"}:
                    children.setdefault(int(parent), []).append(int(entry.name))
    return children


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, zombies excluded."""
    children = children_by_parent()
    below = children.pop(pid, [])
    for process in below:  # grows meanwhile
        below += children.pop(process, [])
    return below


def end_descendants() -> int:
    """Kill the processes below this one, which has adopted orphans; return how many were running at first."""
    first = left = descendants(os.getpid())
    deadline = time.monotonic() + _END_LIMIT_S
    while left and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(0)
        time.sleep(_POLL_S)
        left = descendants(os.getpid())
    reap_orphans(0)
    return len(first)
