"""Runs a training script that may be a fork (tests/warm.py), or waits until it is signalled or released.

    python held.py train.py --steps=40

If the folder ``HELD`` has a file ``after`` with a number of optimizer steps, each process waits after it.
"""

import collections
import faulthandler
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

folder, attempt = Path(os.environ.get("HELD", "/nonexistent")), os.environ.get("HPC_TRAIN_ATTEMPT")
after, left = folder / "after", folder / f"left-{attempt}"
#: Receives the number of each signal that the script handles, whoever has installed the handler.
signals, written = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(written)
counts: collections.Counter[int] = collections.Counter()


def is_signalled() -> bool:
    try:
        return os.read(signals, 1) != b""
    except BlockingIOError:
        return False


def hold(optimizer: object, *_: object) -> None:
    counts[id(optimizer)] += 1
    try:
        is_due = counts[id(optimizer)] == int(after.read_text())
    except FileNotFoundError:
        return
    if not is_due:
        return
    (folder / f"reached-{attempt}-{os.environ['RANK']}").touch()
    while after.exists() and not left.exists():
        if is_signalled():
            left.touch()  # for the other ranks
        time.sleep(0.02)


#: As tests.warm.is_forked: else the script has imported torch by itself, for seconds of CPU time.
is_forked = len(Path("/proc/self/cmdline").read_bytes()) > 60_000
assert is_forked or "MUST_BE_FORKED" not in os.environ
# A fork has its server's settings, and must not have its session.
assert "hpc_train.session" not in sys.modules
faulthandler.enable()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
register_optimizer_step_post_hook(hold)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
