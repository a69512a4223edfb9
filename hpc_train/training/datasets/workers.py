"""Loader processes: they start, ignore the job's signals, die with their rank and are shut down.

``BatchStream`` is the rank's interface to them.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hpc_train.errors import ExitCode, UserError
from hpc_train.experiment.data_facts.by_name import PREFETCHED_BATCHES
from hpc_train.rank import signals
from hpc_train.run import processes
from hpc_train.training.datasets import transport
from hpc_train.training.datasets.reading import Failure, Read, SlotReader, unchanged
from hpc_train.training.datasets.sampler import Slot
from hpc_train.training.distributed import shared_flags, timed_call

#: The death of a killed loader process is detected soon, but its connection may break slightly earlier.
_DEATH_LIMIT_S = 2.0
#: Assumed: torch's thread that pins memory waits for the device, which may hang; it copies a batch in less.
_SHUTDOWN_LIMIT_S = 10.0
#: Maximum number of batches that a rank without loader processes reads at a time, and their total size in
#: bytes. Assumed.
_MAX_AHEAD, _MAX_AHEAD_BYTES = 8, 256 << 10
#: Attributes of torch's private iterator that ``_has_arrived`` uses; present from torch 1.2 to 2.15.
_LOADER_PARTS = ("_task_info", "_rcvd_idx", "_send_idx", "_tasks_outstanding", "_try_get_data")


class WorkerLostError(UserError):
    """A loader process was killed, or ended unexpectedly."""

    exit_code = ExitCode.WORKER_LOST


class BatchStream(Iterator[Read]):
    """The batches of a sampler, in order, prefetched by ``workers`` processes, or read here if that is 0.

    Loader processes start immediately. ``close`` ends them; it is called at the end, and always at exit.
    Python's signal handlers run while ``next`` waits.
    """

    def __init__(
        self, reader: SlotReader, sampler: Sampler[Slot], *, workers: int, device: torch.device
    ) -> None:
        pins = device.type == "cuda"
        self._iterator: Any
        self._deaths: _Deaths | None = None
        if workers:
            self._iterator, self._deaths = _loader_iterator(reader, sampler, workers, pins=pins)
        else:
            self._iterator = _DirectReads(reader, sampler, pins=pins)
        self._can_poll = all(hasattr(self._iterator, part) for part in _LOADER_PARTS)
        #: Received from the loader but not yet requested; the exception that ended it comes last.
        self._taken: deque[Read | Failure | Exception] = deque()
        _open_streams.add(self)

    def __next__(self) -> Read:
        taken = self._taken.popleft() if self._taken else self._take()
        assert taken is not None
        if isinstance(taken, Failure):
            raise taken.error
        if isinstance(taken, Exception):
            raise taken
        return taken

    def holds(self, count: int, within_s: float = 0.0) -> bool:
        """Return True if the next ``count`` batches, or the exception that ends them, arrive ``within_s``.

        Also True if nothing is prefetched, or torch's loader can't be polled.
        """
        end = time.monotonic() + within_s
        while self._can_poll and self._iterator is not None and len(self._taken) < count:
            taken = self._take(until=end)
            if taken is None:
                return False
            self._taken.append(taken)
        return True

    def _take(self, *, until: float | None = None) -> Read | Failure | Exception | None:
        """Return the loader's next batch, or the exception that ends it, for ``__next__`` to raise.

        Waits for it, at most until the monotonic time ``until``: then returns None.
        """
        if self._iterator is None:
            return StopIteration()
        try:
            return next(self._iterator) if until is None or _has_arrived(self._iterator, until) else None
        except StopIteration as end:
            self._end_workers()
            return end
        except Exception as error:
            return self._explained(error)

    def _explained(self, error: Exception) -> Exception:
        """Return the error for a lost loader process, reported by torch or as a broken connection."""
        workers = {worker.sentinel: worker for worker in getattr(self._iterator, "_workers", [])}
        if not workers or not isinstance(error, (RuntimeError, OSError, EOFError)):
            return error
        dead = multiprocessing.connection.wait(list(workers), _DEATH_LIMIT_S)
        if not dead:
            return error
        lost = _lost((self._deaths and self._deaths.first) or workers[dead[0]])
        lost.__cause__ = error
        self._end_workers()
        return lost

    @property
    def worker_pids(self) -> list[int]:
        """The loader processes; empty once closed."""
        return [worker.pid for worker in getattr(self._iterator, "_workers", [])]

    def close(self) -> None:
        """End the loader processes and drop the batches they read. May be called again."""
        self._taken.clear()
        self._end_workers()

    def _end_workers(self) -> None:
        iterator, self._iterator = self._iterator, None
        if not hasattr(iterator, "_shutdown_workers"):
            return
        if self._deaths is not None:
            self._deaths.are_expected = True
            iterator._shutdown_workers()
        else:
            timed_call.within(_SHUTDOWN_LIMIT_S, iterator._shutdown_workers, "loader-shutdown")
        for worker in iterator._workers:
            if worker.is_alive():  # busy, and ignoring the SIGTERM that torch sends
                worker.kill()
        if self._deaths is not None:
            self._deaths.end()


def _loader_iterator(
    reader: SlotReader, sampler: Sampler[Slot], workers: int, *, pins: bool
) -> tuple[Any, _Deaths | None]:
    """Return torch's iterator over the batches, whose loader processes have started, and their watcher."""
    transport.require_shared_memory()
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=sampler,  # type: ignore[arg-type]  # yields slots: see SlotReader.__getitems__
        num_workers=workers,
        collate_fn=unchanged,
        pin_memory=pins,
        generator=torch.Generator(),  # otherwise each iterator draws from the global one
        worker_init_fn=partial(_prepare_worker, os.getpid(), transport.socket_folder()),
        # Forks: the data are not copied and need not be picklable.
        multiprocessing_context=transport.LoaderContext(),
        persistent_workers=True,
        prefetch_factor=PREFETCHED_BATCHES,
    )
    with _quiet_start():
        iterator = iter(loader)
        # With pinned memory torch's thread reads the pipe, and the rank can see which process has died.
        return iterator, None if pins else _Deaths(iterator)


class _Deaths:
    """Lets a rank that reads from the loader's pipe notice that a loader process was killed while it wrote.

    The rank is then in the middle of a message that is never completed, and neither a time limit nor a stop
    signal ends the read: the pipe stays open as long as any process could write to it. So the rank closes its
    own end for writing, and a thread kills the other loader processes once one has died: the rank reads the
    end of the pipe.
    """

    def __init__(self, iterator: Any) -> None:
        #: Set before the loader processes are ended on purpose.
        self.are_expected = False
        #: The loader process that died first.
        self.first: Any = None
        results: Any = getattr(iterator, "_worker_result_queue", None)
        if results is not None and hasattr(results, "_writer"):  # private names; without them nothing changes
            results._writer.close()
        self._workers = {worker.sentinel: worker for worker in getattr(iterator, "_workers", [])}
        # It never holds a lock, so that evaluation can fork loader processes meanwhile.
        self._thread = threading.Thread(target=self._watch, name="loader-deaths", daemon=True)
        if self._workers:
            self._thread.start()

    def end(self) -> None:
        """Return once the thread has ended; the loader processes have ended, or will soon."""
        if self._workers:
            self._thread.join(_DEATH_LIMIT_S)

    def _watch(self) -> None:
        dead = multiprocessing.connection.wait(list(self._workers))
        if self.are_expected:
            return
        self.first = self._workers[dead[0]]
        for worker in self._workers.values():
            if worker is not self.first:
                with suppress(OSError, ValueError):  # the rank has ended it, too
                    worker.kill()


class _DirectReads(Iterator[Read | Failure]):
    """The batches, read by the rank itself on request.

    Small batches of data in memory are read several at a time: the code that reads them is then in the CPU's
    caches for all but the first, and evicts the code of the step less often.
    """

    def __init__(self, reader: SlotReader, sampler: Sampler[Slot], *, pins: bool) -> None:
        self._reader = reader
        self._slots = iter(sampler)
        self._pins = pins
        self._ahead: deque[Read | Failure] = deque()
        self._at_a_time = 0  # until the first batch is read

    def __next__(self) -> Read | Failure:
        if self._ahead:
            return self._ahead.popleft()
        first = self._read(next(self._slots))
        if not self._at_a_time:
            self._at_a_time = self._number_like(first)
        self._ahead.extend(map(self._read, itertools.islice(self._slots, self._at_a_time - 1)))
        return first

    def _read(self, slot: Slot) -> Read | Failure:
        read = self._reader.__getitems__(slot)
        return read.pin_memory() if self._pins and isinstance(read, Read) else read

    def _number_like(self, first: Read | Failure) -> int:
        """Return the number of batches of this one's size that are read at a time."""
        if isinstance(first, Failure) or not self._reader.is_in_memory:
            return 1
        return max(1, min(_MAX_AHEAD, _MAX_AHEAD_BYTES // max(first.batch.nbytes, 1)))


def _lost(worker: Any) -> WorkerLostError:
    worker.join(_DEATH_LIMIT_S)
    code = worker.exitcode
    if code is None or code >= 0:  # not killed by a signal
        return WorkerLostError(
            f"data.workers: a loader process ended by itself (pid {worker.pid}, exit code {code}); its error "
            "is in the rank's log"
        )
    event = f"data.workers: a loader process was killed (pid {worker.pid}, signal {-code})"
    if -code == signal.SIGKILL:
        return WorkerLostError(
            f"{event}; most often the node's memory, or that of the job, ran out; ask for more memory, or "
            "write fewer workers or a smaller micro_batch_size"
        )
    if -code == signal.SIGBUS:
        return WorkerLostError(
            f"{event}; memory that it mapped has no page behind it: {shared_flags.SHM} is full "
            f"({shared_flags.shm_sizes()}), or a file of the data became shorter"
        )
    return WorkerLostError(f"{event}; see the rank's log")


def _has_arrived(iterator: Any, until: float) -> bool:
    """Return True if torch's loader would return its next batch, or its end, without waiting.

    Receives the batches that have arrived. Works like ``_MultiProcessingDataLoaderIter._next_data``, but
    waits only until the monotonic time ``until``. A thread that waits in ``next`` would need none of torch's
    private names; but evaluation forks its loader processes next to training's loader, and any lock that such
    a thread holds at that moment stays locked in the child forever. Here everything happens in the thread
    that forks.
    """
    tasks = iterator._task_info
    while iterator._rcvd_idx < iterator._send_idx and len(tasks[iterator._rcvd_idx]) == 1:
        came, item = iterator._try_get_data(timeout=max(0.0, until - time.monotonic()))
        if not came:
            # Once torch's pin-memory thread has ended, nothing arrives: ``next`` reports it.
            pinning = getattr(iterator, "_pin_memory_thread", None)
            return pinning is not None and not pinning.is_alive()
        number, read = item
        iterator._tasks_outstanding -= 1
        tasks[number] += (read,)
    return True


_open_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


@atexit.register  # after multiprocessing.util's own handler, so it runs before that handler waits for them
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


assert multiprocessing.util, "its exit handler must be registered before ours"


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Start loader processes with the job's signals blocked, and keep torch's SIGCHLD handler out.

    Blocked: a signal between a fork and its ``_prepare_worker`` would run the rank's handler there. SIGCHLD:
    torch's handler raises at any point of the rank's code, even in the middle of a save. Without it a lost
    loader process is noticed when the rank waits for its batch, which is soon enough.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_child = signal.getsignal(signal.SIGCHLD) if in_main_thread else None
    with signals.blocked():
        try:
            yield
        finally:
            if on_child is not None:
                signal.signal(signal.SIGCHLD, on_child)


def _prepare_worker(rank: int, sockets: str | None, worker: int) -> None:
    """Prepare loader process number ``worker`` of the process ``rank``."""
    # Slurm and terminals send these to all processes of a job; only the rank may act on them.
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Torch's watchdog blocks together with a read: forever on a file system that hangs.
    processes.die_with(rank)
    torch.set_num_threads(1)
    transport.use_socket_folder(sockets)
    transport.send_without_names()
