"""How a rank ends: its exit code and its error report."""

from __future__ import annotations

import errno
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from hpc_train.errors import (
    BadFileError,
    BadNodeError,
    EnvironmentRefusesError,
    ExitCode,
    HpcTrainError,
    NonFiniteError,
    StorageError,
    TryAgainError,
    UserError,
)
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import StopFlag
from hpc_train.run import attempts, create, found_micro_batch
from hpc_train.run.checkpoints import committed
from hpc_train.run.storage_errors import error_clauses, error_words, storage_error
from hpc_train.run.tracebacks import refusal
from hpc_train.training.compiling import compile_error
from hpc_train.training.distributed.backends import nccl_words, peer_lost

#: Disk errors that the user can fix; any other OSError is shown with its traceback.
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
#: Messages of torch, its libraries and the kernel if a device or the host is out of memory and there is no
#: error class for it; in lower case.
_DEVICE_IS_FULL, _HOST_IS_FULL = ("out of memory", "alloc_failed"), ("allocate memory", "bad_alloc")


class MicroBatchError(HpcTrainError):
    """A micro-batch does not fit, though one did before or others may use the device: treated as a crash."""


class TrialError(HpcTrainError):
    """A trial of ``micro_batch_size: auto`` failed for a reason other than memory; the text is its error."""


def report(error: BaseException, paths: RunPaths, attempt: int, facts: RankFacts, flag: StopFlag) -> ExitCode:
    """Write this rank's error report, and choose its exit code."""
    cause = _cause(error, paths, attempt, flag)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if peer_lost(error) and not isinstance(cause, UserError):
        _say(f"rank {facts.rank}: a peer is gone: {error}")
        if flag and flag.may_exit_early:  # both received the stop signal; the peer exited first
            return ExitCode.TRY_AGAIN
        if message := nccl_words(error):
            _tell(paths.attempt(attempt), facts.rank, message)
        return ExitCode.PEER_LOST
    # A signal to all processes of a job also ends the compiler's.
    if isinstance(error, TryAgainError) or (flag and compile_error(error) is not None):
        _say(f"rank {facts.rank}: {error}")
        return ExitCode.TRY_AGAIN
    if not isinstance(cause, HpcTrainError) and flag.may_exit_early and (limited := refusal(error)):
        cause = EnvironmentRefusesError(limited)
        if "`ulimit -u`" in limited:  # counts the user's other processes on the node, which may end
            cause.exit_code = ExitCode.FAILED
    is_plain = isinstance(cause, UserError | BadNodeError | NonFiniteError | MicroBatchError | TrialError)
    where = "".join(traceback.format_exception(error))
    text = str(cause) if is_plain else where
    if isinstance(cause, NonFiniteError) and cause.step is not None:
        command = f"hpc-train replay {paths.folder.name} --step {cause.step}"
        text += f"; its batch and the first module with NaN: {command}"
    if not isinstance(cause, StorageError | EnvironmentRefusesError):  # these contain them already
        text = text.rstrip("\n") + error_clauses(error)
    _say(f"{where}{text}" if cause.__cause__ is error else text)
    _tell(paths.attempt(attempt), facts.rank, text)
    return cause.exit_code if isinstance(cause, HpcTrainError) else ExitCode.FAILED


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return ``error`` or its cause if it means that the device or the host is out of memory, else None."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        if isinstance(error, RuntimeError | OSError):
            text = str(error).lower()
            if any(phrase in text for phrase in (*_DEVICE_IS_FULL, *_HOST_IS_FULL)):
                return error
        error = error.__cause__ or error.__context__
    return None


def _tell(attempt: AttemptPaths, rank: int, text: str) -> None:
    try:
        attempts.tell_error(attempt, rank, text)
    except OSError as full:
        _say(f"{attempt.error(rank)} can't be written: {full}")


def _say(text: str) -> None:
    """Print to the rank's log. Errors of a full disk are ignored, since only the exit code matters."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _cause(error: BaseException, paths: RunPaths, attempt: int, flag: StopFlag) -> BaseException:
    """Return the user-facing error (full disk, compiler, out of memory) behind ``error``, else ``error``."""
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        path = Path(error.filename) if error.filename else None
        return storage_error(error, path) if path else StorageError(error_words(error))
    return compile_error(error) or _micro_batch_error(error, paths, attempt, flag) or error


def _micro_batch_error(
    error: BaseException, paths: RunPaths, attempt: int, flag: StopFlag
) -> BadFileError | MicroBatchError | None:
    """Return the error to report if ``error`` means that a step ran out of memory, else None.

    BadFileError if the run has not completed a step: a retry would not succeed.
    """
    full = out_of_memory(error)
    on_gpu = torch.cuda.is_initialized()
    if isinstance(error, HpcTrainError) or full is None or isinstance(full, OSError):
        return None
    text = " ".join(str(full).split()) or type(full).__name__
    if on_gpu and not any(mark in text.lower() for mark in _DEVICE_IS_FULL):
        return None  # the host's memory, which does not depend on the micro-batch
    place = f"cuda:{torch.cuda.current_device()}" if on_gpu else "this node's memory"
    size = create.training_experiment(paths, attempt).optimization.micro_batch_size
    smaller = "a smaller one or auto" if on_gpu else "a smaller one"
    if size == "auto":
        size, smaller = found_micro_batch.kept_size(paths) or "auto", "a smaller number"
    # If the message is the driver's, not the allocator's, other processes may have filled the device.
    is_sure = flag.may_exit_early and not committed(paths) and "CUDA error: out of memory" not in text
    refusal_of_size = (BadFileError if is_sure else MicroBatchError)(
        f"optimization.micro_batch_size: {size} does not fit {place}; write {smaller}, "
        f"activation_checkpointing: blocks, or a parallel.strategy that shards ({text})"
    )
    refusal_of_size.__cause__ = error
    return refusal_of_size
