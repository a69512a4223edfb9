"""Processes that end with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress

from hpc_train.errors import ExitCode

_PR_SET_PDEATHSIG = 1


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
