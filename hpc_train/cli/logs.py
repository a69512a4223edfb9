"""``logs``: what a rank wrote, now or until the run ends."""

from __future__ import annotations

import codecs
import sys
import time
from pathlib import Path

from hpc_train.cli.printing import say
from hpc_train.errors import ExitCode, UsageError, printable
from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import newest_number
from hpc_train.run_folder.finding import find_runs
from hpc_train.run_folder.status import GOING_ON, current_status

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 16


def logs(word: str, *, follow: bool, rank: int, attempt: int | None) -> ExitCode:
    """Print one rank's log to stdout."""
    paths = _one_run(word)
    if follow:
        _follow(paths, rank, attempt)
    else:
        _LogReader(_existing(paths, rank, attempt or newest_number(paths))).print_new()
    return ExitCode.DONE


def _one_run(word: str) -> RunPaths:
    found = find_runs([word])
    if len(found) > 1:
        listed = "\n".join(f"  {paths.folder.name}" for paths in found)
        raise UsageError(f"{word}: means {len(found)} runs, logs takes one:\n{listed}")
    return found[0]


def _existing(paths: RunPaths, rank: int, attempt: int) -> Path:
    log = paths.attempt(attempt).log(rank)
    if log.is_file():
        return log
    if attempt == 0:
        raise UsageError(f"{paths.folder.name}: has not started yet; `logs -f` waits for it")
    there = sorted(path.name for path in log.parent.glob("rank-*.log"))
    raise UsageError(
        f"{log}: there is no such log; attempt {attempt} has {', '.join(there) or 'none'}, "
        f"the newest attempt is {newest_number(paths)}"
    )


def _follow(paths: RunPaths, rank: int, attempt: int | None) -> None:
    """Print until the run, or the attempt that was asked for, has ended and its log is read to the end."""
    number = attempt or max(newest_number(paths), 1)
    reader = _LogReader(paths.attempt(number).log(rank))
    while True:
        newest = newest_number(paths)
        has_ended = newest > number or current_status(paths).state not in GOING_ON
        # Read after asking, so that the last lines are not missed.
        if reader.print_new():
            continue
        if newest > number and attempt is None:
            say(f"attempt {newest} begins")
            number, reader = newest, _LogReader(paths.attempt(newest).log(rank))
        elif has_ended:
            return
        else:
            time.sleep(_POLL_S)


class _LogReader:
    """Prints what a file that grows has more each time; one that is not there yet has nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def print_new(self) -> bool:
        """Return whether there was anything."""
        if not self._path.is_file():
            return False
        start = self._offset
        with self._path.open("rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                self._offset += len(chunk)
                self._print(chunk)
        return self._offset > start

    def _print(self, chunk: bytes) -> None:
        if sys.stdout.isatty():
            # Carriage returns of progress bars would be shown as escapes.
            sys.stdout.write(printable(self._decoder.decode(chunk).replace("\r", "\n")))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
