"""Common parts of the processes of ``loggers.process_logger``: input, termination, and the lock of a run.

Such a process reads one JSON object per line from stdin: first the settings, then any of ``committed`` (the
step up to which rows are final), ``newest`` (a row that is not final yet) and, last, ``end`` (0 if the run
has completed). It writes a line to stdout once it has started, and ends with its input, or at SIGALRM. The
first failure is one line on stderr, and a count of missing rows at the end is another; it exits with 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn

from hpc_train.errors import UserError, printable
from hpc_train.loggers.base import Row
from hpc_train.loggers.process_logger import notice, warning
from hpc_train.loggers.tracker_environment import Tracker
from hpc_train.paths import RunPaths
from hpc_train.redaction import redacted
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.metric_rows import iter_rows

#: Tracker → (package, oldest version) as in pyproject.toml; the first one that is installed is checked.
OLDEST = {
    "wandb": (("wandb", "0.20"),),
    "mlflow": (("mlflow", "3"), ("mlflow-skinny", "3")),
    "tensorboard": (("tensorboard", "2.15"),),
}
#: After the input has ended without ``end`` (the rank was killed), at most this long.
ORPHAN_LIMIT_S = 10
#: ``sync`` is ended after this time, so that the process of an attempt does not wait for it any longer.
SYNC_LIMIT_S = 600
_LOCK_POLL_S = 0.1


class BusyError(Exception):
    """Another process sends the run's rows."""


class TooOldPackageError(UserError):
    """A package is older than the oldest version that works."""


class Mirror(ABC):
    """The rows of ``metrics.jsonl`` at a service. The first failure is reported; failed rows are sent at the
    next commit.
    """

    #: Package of the service's client.
    name: Tracker

    def __init__(self, settings: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._has_warned = False
        self._place = "the server"
        self._is_sync: bool = settings.get("is_sync", False)
        self._paths = RunPaths(Path(settings["folder"]))
        self._lock: IO[bytes] | None = None
        self._committed_step = -1
        #: Why the newest attempt to send has failed; None if it has not.
        self._problem: str | None = None
        #: The run's page or its id at the service; None if it has none.
        self.target: str | None = None
        #: Rows that this process has sent.
        self.num_sent = 0

    @abstractmethod
    def begin(self) -> None:
        """Check the client's settings, and open the run if the service is there."""

    @abstractmethod
    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that the service lacks."""

    def show(self, row: Row) -> None:  # noqa: B027 (most services can't)
        """Show a row that may still be withdrawn, if the service can replace it."""

    @abstractmethod
    def finish(self, exit_code: int | None) -> None:
        """End: 0 if the run has completed, None if the rank was killed or the run continues."""

    @abstractmethod
    def _num_at_service(self) -> tuple[int, bool]:
        """Return the number of rows that the service has at least, and whether that is the exact number."""

    def missing(self, committed_step: int, problem: str | None = None) -> str | None:
        """Return how many rows up to a step the service has, and why some are missing; None if it has all.

        ``problem``: another failure; with it the result is None only if there are no rows.
        """
        num_rows = sum(1 for row in iter_rows(self._paths.metrics) if row["step"] <= committed_step)
        num_there, is_exact = self._num_at_service()
        problem = problem or self._problem
        if num_there >= num_rows and (problem is None or num_rows == 0):
            return None
        has = f"{'' if is_exact else 'at least '}{min(num_there, num_rows):,}"
        reason = problem or self._refusal()
        return f"{self._place} has {has} of {num_rows:,} rows" + (f" ({reason})" if reason else "")

    def _refusal(self) -> str | None:
        """Return why the service has refused rows; None if that is unknown."""
        return None

    def _take_lock(self, path: Path) -> None:
        """Lock the run; for ``sync`` raise BusyError at once if another process has it."""
        if self._lock is None:
            self._lock = locked(path, limit_s=0, must=True) if self._is_sync else locked(path)

    def _fail(self, error: Exception) -> None:
        """Report the first failure, and let ``sync`` send the rows meanwhile."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._problem = in_a_line(error)
        self.tell_once(self._problem)

    def tell_once(self, problem: str) -> None:
        """Report a failure, unless one was reported before."""
        if not self._has_warned:
            self._has_warned = True
            self._tell(problem)


class _Input(threading.Thread):
    """Reads stdin, so that the newest step is known while the mirror waits. None ends ``news``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.news: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.committed_step = -1

    def run(self) -> None:
        with suppress(ValueError):  # the rank was killed while it wrote a line
            for line in sys.stdin:
                news = json.loads(line)
                self.committed_step = news.get("committed", self.committed_step)
                self.news.put(news)
        self.news.put(None)


def main(mirror_class: type[Mirror]) -> NoReturn:
    """Send the rows that stdin requests.

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

    def tell(problem: str) -> None:
        print(notice(name, problem), file=ours, flush=True)

    name = mirror_class.name
    settings = json.loads(next(sys.stdin))
    mirror = mirror_class(settings, tell)
    read = _Input()
    read.start()

    def end(problem: str | None = None) -> NoReturn:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one report is enough
        if (missing := mirror.missing(read.committed_step, problem)) is not None:
            print(warning(name, missing, settings["run_id"]), file=ours, flush=True)
        elif problem is not None:
            mirror.tell_once(problem)
        os._exit(0)

    signal.signal(signal.SIGALRM, lambda *_: end("it did not answer in time"))
    try:
        check_version(name)
        _send(mirror, read.news, started)
    except Exception as error:
        end(in_a_line(error))
    end()


def _send(mirror: Mirror, news: SimpleQueue[dict[str, Any] | None], started: int) -> None:
    mirror.begin()
    with suppress(OSError):  # the rank was killed
        os.write(started, b"started\n")
    exit_code = None
    while changes := news.get():
        if "committed" in changes:
            mirror.send(changes["committed"])
        if "newest" in changes:
            mirror.show(changes["newest"])
        exit_code = changes.get("end")
    if exit_code is None:  # the rank was killed
        signal.alarm(ORPHAN_LIMIT_S)
    mirror.finish(exit_code)


def check_version(tracker: str) -> None:
    """Raise TooOldPackageError if the tracker's package is too old; a missing one raises nothing here."""
    for package, oldest in OLDEST[tracker]:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if _release(installed) < _release(oldest):
            remedy = f"type pip install -U '{package}>={oldest}'"
            raise TooOldPackageError(f"{package} {installed} is too old; {remedy}")
        return


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+-]", text)[0]))


def in_a_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, without secrets."""
    first_line = printable(redacted(str(error))).strip().partition("\n")[0]
    if isinstance(error, TooOldPackageError):
        return first_line
    return f"{type(error).__name__}: {first_line}"


def locked(
    path: Path, *, limit_s: float = SYNC_LIMIT_S + ORPHAN_LIMIT_S, must: bool = False
) -> IO[bytes] | None:
    """Return the file ``path``, locked once no other process has it; if locks do not work, not locked.

    Waits as long as ``sync``, or the process of a killed attempt, may take to send its rows; after that the
    lock belongs to a lost node, and is ignored, or with ``must`` BusyError is raised. The parent may be
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
