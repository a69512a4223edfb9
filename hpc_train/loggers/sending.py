"""Mirrors of a run's ``metrics.jsonl`` at a tracker, one class per tracker, and the rows that a tracker has.

The history of wandb and of MLflow is append-only. So a row is sent once a checkpoint contains its step,
because no rollback or resume withdraws it after that. A resumed run continues after the last row that the
tracker has. If rows that were sent are withdrawn nevertheless (the checkpoint that contained them is
damaged), the whole file goes to another run of the tracker, ``<id>-2``: the next *segment*.

The record, ``sent.json``, is written before rows are sent, so that it names at least those that the tracker
may have. wandb's offline files have a separate record, since an offline attempt may write them while ``sync``
sends; the next process reads both.
"""

from __future__ import annotations

import fcntl
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hpc_train.errors import UserError
from hpc_train.loggers.base import Row
from hpc_train.paths import RunPaths
from hpc_train.redaction import redacted
from hpc_train.run.files import UnreadableFileError, open_regular, read_json, write_json
from hpc_train.run.metric_rows import iter_rows, parse_row

#: Tracker → (package, oldest version) as in pyproject.toml; the first one that is installed is checked.
OLDEST = {
    "wandb": (("wandb", "0.20"),),
    "mlflow": (("mlflow", "3"), ("mlflow-skinny", "3")),
    "tensorboard": (("tensorboard", "2.15"),),
}
#: After the input of an attempt's process has ended without ``end`` (the rank was killed), at most this long.
ORPHAN_LIMIT_S = 10
#: ``sync`` is ended after this time, so that the process of an attempt does not wait for it any longer.
SYNC_LIMIT_S = 600
_LOCK_POLL_S = 0.1
#: Rows sent between two writes of the record (assumed).
_BATCH_ROWS = 1000


class BusyError(Exception):
    """Another process sends the run's rows."""


class TooOldPackageError(UserError):
    """A package is older than the oldest version that works."""


class Mirror(ABC):
    """The rows of ``metrics.jsonl`` at a tracker. The first failure is reported; failed rows are sent at the
    next commit.
    """

    def __init__(self, settings: dict[str, Any], report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._has_warned = False
        self._place = "the server"
        self._is_sync: bool = settings.get("is_sync", False)
        self._paths = RunPaths(Path(settings["folder"]))
        self._lock: IO[bytes] | None = None
        self._committed_step = -1
        #: Why the newest attempt to send has failed; None if it has not.
        self._problem: str | None = None
        #: The run's page or its id at the tracker; None if it has none.
        self.target: str | None = None
        #: Rows that this process has sent.
        self.num_sent = 0

    @abstractmethod
    def begin(self) -> None:
        """Check the client's settings, and open the run if the tracker is there."""

    @abstractmethod
    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that the tracker lacks."""

    def show(self, row: Row) -> None:  # noqa: B027 (most trackers can't)
        """Show a row that may still be withdrawn, if the tracker can replace it."""

    @abstractmethod
    def finish(self, exit_code: int | None) -> None:
        """End: 0 if the run has completed, None if the rank was killed or the run continues."""

    @abstractmethod
    def _num_at_tracker(self) -> tuple[int, bool]:
        """Return the number of rows that the tracker has at least, and whether that is the exact number."""

    def missing(self, committed_step: int, problem: str | None = None) -> str | None:
        """Return how many rows up to a step the tracker has, and why some are missing; None if it has all.

        ``problem``: another failure; with it the result is None only if there are no rows.
        """
        num_rows = sum(1 for row in iter_rows(self._paths.metrics) if row["step"] <= committed_step)
        num_there, is_exact = self._num_at_tracker()
        problem = problem or self._problem
        if num_there >= num_rows and (problem is None or num_rows == 0):
            return None
        has = f"{'' if is_exact else 'at least '}{min(num_there, num_rows):,}"
        reason = problem or self._refusal()
        return f"{self._place} has {has} of {num_rows:,} rows" + (f" ({reason})" if reason else "")

    def _refusal(self) -> str | None:
        """Return why the tracker has refused rows; None if that is unknown."""
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
        self.report_once(self._problem)

    def report_once(self, problem: str) -> None:
        """Report a failure, unless one was reported before."""
        if not self._has_warned:
            self._has_warned = True
            self._report(problem)


@dataclass(frozen=True)
class Sent:
    """The rows that the tracker may have: ``rows`` of them, the ``last`` one ending at byte ``end``."""

    segment: int
    rows: int
    end: int
    last: str

    @classmethod
    def read(cls, path: Path) -> Sent | None:
        """Return the record; None if it is missing or damaged."""
        data: dict[str, Any] = read_json(path) or {}
        sent: dict[str, Any] = {name: data.get(name) for name in ("segment", "rows", "end", "last")}
        is_valid = isinstance(sent.pop("last"), str) and all(
            type(number) is int and number > 0 for number in sent.values()
        )
        return cls(**sent, last=data["last"]) if is_valid else None

    def write(self, path: Path) -> None:
        """Replace the record atomically; its folder is made if it is missing."""
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"version": 1} | asdict(self))


class SentRows:
    """The rows of a run folder's ``metrics.jsonl`` to send.

    ``record`` is written by one process at a time; ``others`` are read only, and the farthest record applies.
    """

    def __init__(self, metrics: Path, record: Path, *others: Path) -> None:
        self._metrics = metrics
        self._record = record
        records = [sent for path in (record, *others) if (sent := Sent.read(path)) is not None]
        self._sent = max(records, key=lambda sent: (sent.segment, sent.rows), default=None)
        #: Number of the tracker's run that receives the rows.
        self.segment = 1 if self._sent is None else self._sent.segment
        #: Number of rows, from the first one on, that were skipped or yielded.
        self.num_read = 0
        self._end = 0
        if self.has_withdrawn():
            self.begin_segment()

    @property
    def num_may_have(self) -> int:
        """Number of rows, from the first one on, that the tracker may have."""
        return 0 if self._sent is None else self._sent.rows

    @property
    def suffix(self) -> str:
        """The suffix of that run's id and name."""
        return "" if self.segment == 1 else f"-{self.segment}"

    def has_withdrawn(self) -> bool:
        """Return True if rows that the tracker may have are no longer in the file."""
        if self._sent is None or self._sent.rows == 0:
            return False
        last = self._sent.last.encode()
        try:
            with open_regular(self._metrics) as file:
                file.seek(max(0, self._sent.end - len(last)))
                return file.read(len(last)) != last
        except (FileNotFoundError, UnreadableFileError):
            return True

    def begin_segment(self) -> None:
        """Switch to another run of the tracker, which receives the file from its first row."""
        self.segment += 1
        self._sent = None
        self.num_read = self._end = 0

    def skip(self, count: int) -> bool:
        """Continue after the first ``count`` rows; False if they can't be rows that were sent."""
        if count == 0:
            return True
        if self._sent is None or count > self._sent.rows:
            return False
        return sum(1 for _ in islice(self._read(), count)) == count

    def batches_up_to(self, step: int) -> Iterator[list[tuple[int, Row]]]:
        """Yield (number, row) of the rows up to ``step`` that were not yielded yet, in batches that are
        recorded together.
        """
        number = self.num_read
        while batch := list(islice(self._read(step), _BATCH_ROWS)):
            if self._sent is None or self.num_read > self._sent.rows:
                self._sent = Sent(self.segment, self.num_read, self._end, batch[-1][0].decode())
                self._sent.write(self._record)
            yield [(number + index, row) for index, (_, row) in enumerate(batch)]
            number += len(batch)

    def _read(self, step: int | None = None) -> Iterator[tuple[bytes, Row]]:
        """Yield the next (line, row), up to ``step``, and advance past each."""
        try:
            file = open_regular(self._metrics)
        except (FileNotFoundError, UnreadableFileError):
            return
        with file:
            file.seek(self._end)
            for line in file:
                row = parse_row(line)
                if not line.endswith(b"\n") or (row is not None and step is not None and row["step"] > step):
                    return
                self._end += len(line)
                if row is not None:
                    self.num_read += 1
                    yield line, row


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
    first_line = redacted(str(error)).strip().partition("\n")[0]
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
