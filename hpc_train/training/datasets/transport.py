"""Sends batches from loader processes to the rank without losing any.

torch sends a batch as file descriptors of shared memory, through a Unix socket below ``TMPDIR``. If the
thread that sends raises (a full /dev/shm, a path too long for a socket, no more threads or files),
multiprocessing prints the error and drops the batch, and the rank waits for it. Here such a batch is sent
through the pipe between the two processes instead: slower, but without other resources. A batch that can't be
pickled is replaced by a ``Failure``. The shared memory never has a name, so a process that is killed leaves
nothing in /dev/shm. Called by ``workers``.
"""

from __future__ import annotations

import logging
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import tempfile
import traceback
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_storage

from hpc_train.errors import StorageError
from hpc_train.training.datasets.reading import Failure
from hpc_train.training.distributed import shared_flags
from hpc_train.training.distributed.forking import RunningContext

#: Maximum path length of a Unix socket in bytes (struct sockaddr_un, without the final NUL).
_SOCKET_PATH_BYTES = 107
#: The path that multiprocessing appends to the temporary folder.
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", shared_flags.SHM)
_log = logging.getLogger(__name__)


def require_shared_memory() -> None:
    """Raise StorageError if loader processes can't start because there are no semaphores."""
    if reason := shared_flags.shm_refusal():
        raise StorageError(
            f"data.workers: {reason}; loader processes need it: have it mounted writable and larger "
            "(`--shm-size` of a container), or write data.workers: 0"
        )


@cache
def socket_folder() -> str | None:
    """Return a folder for the sockets of loader processes; None: the temporary folder, as usual."""
    try:
        usual = tempfile.gettempdir()
    except OSError:  # no folder is writable: batches go through the pipe
        return None
    if len(os.fsencode(usual)) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES:
        return None
    short = next((folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)
    if short is not None:
        _log.info("TMPDIR: %s is too long for sockets of loader processes, which are in %s", usual, short)
    return short


def use_socket_folder(folder: str | None) -> None:
    """Make this loader process create its sockets below ``folder``, the result of ``socket_folder``."""
    if folder is None:
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        multiprocessing.util.get_temp_dir()  # created once per process, and removed at its end
    finally:
        tempfile.tempdir = before


def send_without_names() -> None:
    """Make this loader process send batches in shared memory that has no name.

    Torch's has one until its pages are allocated. The batch of a process that is killed meanwhile would stay
    in memory until the node is restarted.
    """
    ForkingPickler.register(torch.UntypedStorage, _reduce)


def _reduce(storage: Any) -> tuple[Any, ...]:
    """Return torch's reduction of a storage for pickle; its content is copied into shared memory once."""
    is_private = storage.device.type == "cpu" and storage.nbytes() and not storage.is_shared()
    if is_private and get_sharing_strategy() == "file_descriptor":
        if not hasattr(storage, "hpc_train_shared"):  # several tensors may be views of one storage
            storage.hpc_train_shared = _shared_copy(storage)
        storage = storage.hpc_train_shared or storage
    return reduce_storage(storage)


def _shared_copy(storage: Any) -> Any:
    """Return a copy in shared memory without a name; None if the system offers none. Raises OSError."""
    try:
        file = os.open(shared_flags.SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    storage_type: Any = torch.UntypedStorage  # the method is not part of torch's annotations
    try:
        os.posix_fallocate(file, 0, storage.nbytes())
        shared = storage_type._new_shared_fd_cpu(file, storage.nbytes())
    finally:
        os.close(file)
    return shared.copy_(storage)


if TYPE_CHECKING:
    _Queue = multiprocessing.queues.Queue[Any]
else:
    _Queue = multiprocessing.queues.Queue  # not generic at run time


class LoaderContext(RunningContext):
    """Forks loader processes, and makes the queues between them and the rank."""

    def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802  (multiprocessing's name)
        """Return a queue that drops nothing."""
        return LoaderQueue(maxsize, ctx=self.get_context())


class _InPipe:
    """An object that is pickled without shared memory, and unpickled as itself."""

    def __init__(self, content: Any) -> None:
        self._pickled = pickle.dumps(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


class LoaderQueue(_Queue):
    """multiprocessing's queue; a loader process sends items through the pipe if its thread can't send them.

    Items of loader processes are (number, batch). In the rank, which sends slots, the queue is unchanged.
    """

    _has_warned = False

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send ``obj``; in a loader process also if no thread can be started for it."""
        try:
            super().put(obj, block, timeout)
        except RuntimeError as error:
            if not self._is_loader:
                raise
            self._thread: Any = None  # the next item tries again, instead of being left in the buffer
            self._send_by_pipe(error, obj)

    @property
    def _is_loader(self) -> bool:
        return os.getpid() != self._opid  # type: ignore[attr-defined]  # private names

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        """Called by the sending thread if it could not send ``item``."""
        if not self._is_loader:
            traceback.print_exception(error)
            return
        if isinstance(item, tuple):
            self._sem.acquire()  # type: ignore[attr-defined]  # released for this item, which is sent now
            self._send_by_pipe(error, item)
        elif not isinstance(error, BrokenPipeError):  # the pipe failed, but the rank still exists
            traceback.print_exception(error)
            os._exit(1)

    def _send_by_pipe(self, error: Exception, item: tuple[Any, Any]) -> None:
        number, content = item
        try:
            message = ForkingPickler.dumps((number, _InPipe(content)))
        except Exception as second:
            message = ForkingPickler.dumps((number, _failure(content, second)))
        else:
            self._warn(error)
        try:
            with self._wlock:  # type: ignore[attr-defined]
                self._writer.send_bytes(message)  # type: ignore[attr-defined]
        except BrokenPipeError:  # the rank has ended
            pass
        except Exception as last:  # nothing can be sent: the rank notices the end of this process
            traceback.print_exception(last)
            os._exit(1)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "data.workers: a batch could not be sent as shared memory and goes through a pipe, which "
                "takes longer: %s (%s: %s; TMPDIR: %s)",
                " ".join(str(error).split()),
                shared_flags.SHM,
                shared_flags.shm_sizes(),
                os.environ.get("TMPDIR", "not set"),
            )


def _failure(content: Any, error: Exception) -> Failure:
    """Return the failure that is sent to the rank instead of an item that can't be pickled."""
    message = getattr(content, "exc_msg", None)  # torch's wrapper of an unpicklable exception
    if message is not None:
        return Failure(str(message), kind="crash")
    text = "".join(traceback.format_exception(error))
    return Failure(
        f"a loader process could not send a batch: {text}",
        kind="transient" if isinstance(error, MemoryError | OSError) else "crash",
    )
