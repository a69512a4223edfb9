"""What the processes of ``loggers.process_logger`` share: their input, their end, and the lock of a run.

Such a process reads one JSON object per line from stdin: first the settings, then any of ``committed`` (the
step up to which rows are final), ``newest`` (a row that is not final yet) and, last, ``end`` (0 if the run
has completed). It writes a line to stdout once it has started, and ends with its input. If anything fails it
prints one line on stderr and exits with 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from hpc_train.errors import printable
from hpc_train.loggers.base import Row
from hpc_train.loggers.packages import TooOldPackageError, check_version
from hpc_train.loggers.process_logger import warning
from hpc_train.redaction import redacted
from hpc_train.run.files import UnreadableFileError, open_regular

#: After the input has ended without ``end`` (the rank was killed), at most this long.
ORPHAN_LIMIT_S = 10
#: ``sync`` is ended after this time, so that the process of an attempt does not wait for it any longer.
SYNC_LIMIT_S = 600
_LOCK_POLL_S = 0.1


class BusyError(Exception):
    """Another process sends the run's rows."""


class Mirror(Protocol):
    """The rows of ``metrics.jsonl`` at a service."""

    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that the service lacks."""

    def show(self, row: Row) -> None:
        """Take a row that may still be withdrawn."""

    def finish(self, exit_code: int | None) -> None:
        """End: 0 if the run has completed, None if the rank was killed."""


def main(name: str, make: Callable[[dict[str, Any], Callable[[str], None]], Mirror]) -> NoReturn:
    """Send what stdin says by the mirror that ``make`` returns for the settings, and a way to warn.

    stdout and stderr are redirected to /dev/null for the service's client; the process exits without its
    exit handlers, which would wait for unsent data.
    """
    ours = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
    started = os.dup(sys.stdout.fileno())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    # A job's signals reach all of its processes; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    run_id = ""

    def warn(what: str) -> None:
        print(warning(name, what, run_id), file=ours, flush=True)

    def make_mirror(settings: dict[str, Any]) -> Mirror:
        nonlocal run_id
        run_id = settings["run_id"]
        check_version(name)
        return make(settings, warn)

    try:
        _send(sys.stdin, make_mirror, started)
    except Exception as error:
        warn(in_a_line(error))
    ours.close()
    os._exit(0)


def _send(lines: IO[str], make: Callable[[dict[str, Any]], Mirror], started: int) -> None:
    mirror = make(json.loads(next(lines)))
    with suppress(OSError):  # the rank was killed
        os.write(started, b"started\n")
    exit_code = None
    for line in lines:
        news = json.loads(line)
        if "committed" in news:
            mirror.send(news["committed"])
        if "newest" in news:
            mirror.show(news["newest"])
        exit_code = news.get("end")
    if exit_code is None:  # the rank was killed
        signal.alarm(ORPHAN_LIMIT_S)
    mirror.finish(exit_code)


def in_a_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, without secrets."""
    first_line = printable(redacted(str(error))).strip().partition("\n")[0]
    if isinstance(error, TooOldPackageError):
        return first_line
    return f"{type(error).__name__}: {first_line}"


def lock_for(settings: dict[str, Any], path: Path) -> IO[bytes] | None:
    """Return ``locked(path)``; for ``sync`` raise BusyError at once if another process has it."""
    return locked(path, limit_s=0, must=True) if settings.get("is_sync") else locked(path)


def locked(
    path: Path, *, limit_s: float = SYNC_LIMIT_S + ORPHAN_LIMIT_S, must: bool = False
) -> IO[bytes] | None:
    """Return the file ``path``, locked once no other process has it; if locks do not work, not locked.

    Waits as long as ``sync``, or the process of a killed attempt, may take to send its rows; after that the
    lock is of a node that is gone, and is ignored, or with ``must`` BusyError is raised. The parent may be
    missing.
    """
    with suppress(OSError, UnreadableFileError):
        path.parent.mkdir(exist_ok=True)
        file = open_regular(path, "wb")
        deadline = time.monotonic() + limit_s
        while not _is_locked(file):
            if time.monotonic() >= deadline:
                if must:
                    raise BusyError
                break
            time.sleep(_LOCK_POLL_S)
        return file
    return None


def _is_locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
