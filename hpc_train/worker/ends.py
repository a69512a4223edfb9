"""How a rank ends: its exit code, and what it leaves for people."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path

from hpc_train.engine.compiling import compile_error
from hpc_train.engine.shards import storage_error
from hpc_train.errors import ExitCode, HpcTrainError, NonFiniteError, TryAgainError, UserError
from hpc_train.paths import RunPaths
from hpc_train.run_folder.ends import tell_error
from hpc_train.runtime.process_group import peer_lost
from hpc_train.runtime.ranks import RankFacts
from hpc_train.runtime.signals import StopFlag

#: Errors of the disk that the user mends; any other OSError is shown whole.
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def report(error: BaseException, paths: RunPaths, attempt: int, facts: RankFacts, flag: StopFlag) -> ExitCode:
    """Write down why this rank ends, and choose its exit code."""
    cause = _cause(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if peer_lost(error) and not isinstance(cause, UserError):
        print(f"rank {facts.rank}: a peer is gone: {error}", file=sys.stderr, flush=True)
        # Asked to stop like this one, the peer was only quicker to leave.
        return ExitCode.TRY_AGAIN if flag and flag.has_nothing_to_lose else ExitCode.PEER_LOST
    if isinstance(error, TryAgainError):
        print(f"rank {facts.rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.TRY_AGAIN
    is_plain = isinstance(cause, UserError | NonFiniteError)
    text = str(cause) if is_plain else "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    try:
        tell_error(paths.attempt(attempt), facts.rank, text)
    except OSError as full:
        print(f"{paths.attempt(attempt).error(facts.rank)} can't be written: {full}", file=sys.stderr)
    return cause.exit_code if isinstance(cause, HpcTrainError) else ExitCode.FAILED


def _cause(error: BaseException) -> BaseException:
    """Return the error in the user's terms where it has any: what a compiler or a full disk said."""
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return storage_error(error, Path(error.filename or "the run's folder"))
    return compile_error(error) or error
