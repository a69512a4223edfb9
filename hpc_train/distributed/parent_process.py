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
    """Have the kernel kill this process as soon as its ``parent`` is gone, however it ends.

    To be called by the child. It ends here if the parent has gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before prctl
        os._exit(int(ExitCode.PEER_LOST))


def end_daemons() -> None:
    """Kill the children that Python would end at its exit, before ``os._exit``, which leaves them behind."""
    with suppress(Exception):  # another thread may be starting one
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
