"""Runs a function in a forked child and receives its result; its side effects end with the child.

``training.model_size`` and ``training.flops`` run the user's code on the meta device; in this process,
tensors that the code caches would stay on that device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from hpc_train.distributed import parent_process
from hpc_train.distributed.forking import RunningContext


class ForkedCall:
    """A call that runs in a child of this process and ends with it. The child's output is dropped.

    On a GPU the call may run a backward pass only if this process has run none: autograd's threads are not
    forked.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        context = RunningContext()
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(function, sender, os.getpid()), daemon=True)
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


def _run(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    parent_process.die_with(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the model may print, and will again when it is used
        os.dup2(nowhere, stream)
    try:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not forked
        sender.send(function())
    finally:
        os._exit(0)
