"""Loader processes: how they start, ignore the job's signals, die with their rank and are shut down."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hpc_train.datasets.reading import Failure, SlotReader, unchanged
from hpc_train.datasets.sampler import Slot
from hpc_train.errors import BadFileError, UserError
from hpc_train.runtime.data_info import Batch

#: Slurm and terminals send these to all processes of a job; only the rank may act on them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
_PREFETCHED_BATCHES = 2
_PR_SET_PDEATHSIG = 1


class WorkerLostError(UserError):
    """A loader process was killed."""


class BatchStream(Iterator[Batch]):
    """The batches of a sampler, in its order, read ahead by ``workers`` processes, or here where that is 0.

    Workers start at once. ``close`` ends them; it is called at the end, and at exit whatever happened.
    """

    def __init__(
        self, reader: SlotReader, sampler: Sampler[Slot], *, workers: int, device: torch.device
    ) -> None:
        multiprocess: dict[str, Any] = {}
        if workers:
            multiprocess = {
                "worker_init_fn": _prepare_worker,
                "multiprocessing_context": "fork",  # the data are not copied, and need not be picklable
                "persistent_workers": True,
                "prefetch_factor": _PREFETCHED_BATCHES,
            }
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_sampler=sampler,  # type: ignore[arg-type]  # yields slots: see SlotReader.__getitems__
            num_workers=workers,
            collate_fn=unchanged,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else each iterator draws from the global one
            **multiprocess,
        )
        with _quiet_start():
            self._iterator: Any = iter(loader)
        _open_streams.add(self)

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise WorkerLostError(
                f"data.workers: a loader process was killed ({str(error).splitlines()[0]}); most "
                "often memory, or shared memory in /dev/shm, ran out; ask for more memory, or write "
                "fewer workers or a smaller micro_batch_size"
            ) from error
        if isinstance(batch, Failure):
            raise BadFileError(batch.message)
        return batch

    @property
    def worker_pids(self) -> list[int]:
        """The loader processes, none once closed."""
        return [worker.pid for worker in getattr(self._iterator, "_workers", [])]

    def close(self) -> None:
        """End the workers. May be called again."""
        iterator, self._iterator = self._iterator, None
        if not hasattr(iterator, "_shutdown_workers"):
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # busy, and deaf to the SIGTERM that torch sends
                worker.kill()


_open_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


@atexit.register  # after multiprocessing.util's own handler, so it runs before that one waits for the workers
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


assert multiprocessing.util, "its exit handler must be registered before ours"


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Start workers with the job's signals blocked, and keep torch's SIGCHLD handler out.

    Blocked: a signal between a worker's fork and its ``_prepare_worker`` would run the rank's handler there.
    SIGCHLD: torch's handler raises wherever the rank happens to be, in the middle of a save too. Without it
    a lost worker is noticed when its batch is waited for, which is soon enough.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_child = signal.getsignal(signal.SIGCHLD) if in_main_thread else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        if on_child is not None:
            signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _prepare_worker(worker: int) -> None:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    torch.set_num_threads(1)
