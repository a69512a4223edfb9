"""``logs``: the output of a rank, now or until the run ends; before ranks start, the batch script's."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TypedDict

from hpc_train.cli.command_options import LogsOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import columns, put_json, say
from hpc_train.errors import ExitCode, UsageError, counted, printable
from hpc_train.launchers.lookup import launcher_of, statuses
from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys, in_words
from hpc_train.run.attempts import newest_number, read_record
from hpc_train.run.files import read_json
from hpc_train.run.find import run_name, run_names, started
from hpc_train.run.metric_rows import lines_from_end
from hpc_train.run.run_status import GOING_ON, read_status

_POLL_S = 0.2
#: Interval between queries that may reach the scheduler; its answers are cached for longer.
_ASK_S = 1.0
_CHUNK_BYTES = 1 << 16
#: Number of lines of an existing log that ``logs -f`` prints.
FOLLOWED_LINES = 20


class LogFile(TypedDict):
    """One log of an attempt."""

    attempt: int
    rank: int
    file: str
    bytes: int


class Log(TypedDict):
    """The lines that are printed without ``--json``, and where all logs of the run are."""

    #: The run's.
    id: str
    name: str
    path: str
    #: The log that was read: of a rank, or the output of the batch script before any rank started.
    file: str
    #: Null for a batch script.
    attempt: int | None
    rank: int | None
    #: Without line breaks.
    lines: list[str]
    logs: list[LogFile]


def logs(options: LogsOptions) -> ExitCode:
    """Print one rank's log to stdout; as JSON with all logs of the run."""
    if options.as_json and options.follow:
        raise UsageError("--json and --follow exclude each other; use one of them")
    paths = _one_run(options.run, last=options.last)
    rank, attempt, lines = options.rank, options.attempt, options.lines
    if lines is None:
        lines = FOLLOWED_LINES if options.follow else 0
    if options.print_all:
        lines = 0
    earlier = None if attempt else attempt_before_start(paths, rank)
    if options.follow:
        if earlier and earlier < newest_number(paths):
            _print_earlier(paths, rank, earlier, lines)
        _follow(paths, rank, attempt, lines)
        return ExitCode.DONE
    log, is_output = find_log(paths, rank, attempt)
    if options.as_json:
        number = None if is_output else attempt or earlier or newest_number(paths)
        put_json(_to_json(paths, log, number, None if is_output else rank, last_lines(log, lines)))
    elif earlier:
        is_all = options.print_all or options.lines == 0
        _print_earlier(paths, rank, earlier, lines or (0 if is_all else FOLLOWED_LINES))
    else:
        _LogReader(log, lines).print_new()
        if attempt is None and not is_output:
            _say_earlier(paths)
    return ExitCode.DONE


def find_log(paths: RunPaths, rank: int, attempt: int | None) -> tuple[Path, bool]:
    """Return a rank's log, by default of the newest attempt that has one.

    Before any rank started it is the output of the launcher's job; then the second value is True. Raises
    UsageError if there is no log.
    """
    if attempt is None and (earlier := attempt_before_start(paths, rank)):
        return paths.attempt(earlier).log(rank), False
    output = launcher_of(paths).output(paths) if attempt is None else None
    if output is not None:
        return output, True
    return _existing(paths, rank, attempt or newest_number(paths)), False


def attempt_before_start(paths: RunPaths, rank: int) -> int | None:
    """Return the last attempt with output of the rank while the next one has none yet; else None."""
    newest, state = newest_number(paths), read_status(paths).state
    started = [number for number in range(newest, 0, -1) if _has_output(paths.attempt(number).log(rank))]
    if not started or state not in GOING_ON or (started[0] == newest and state == "running"):
        return None
    logs = paths.attempt(newest).files_of_ranks(".log").values()
    is_other_rank = started[0] != newest and any(map(_has_output, logs))
    return None if is_other_rank or statuses([paths])[0].state not in GOING_ON else started[0]


def _has_output(log: Path) -> bool:
    return log.is_file() and log.stat().st_size > 0


def _print_earlier(paths: RunPaths, rank: int, number: int, lines: int) -> None:
    """Print the last lines of an attempt that has ended, why it ended, and that the next one starts."""
    _LogReader(paths.attempt(number).log(rank), lines).print_new()
    record = read_record(paths.attempt(number))
    if record is not None and record.reason:
        say(f"attempt {number}: {record.reason}")
    newest, (status,) = newest_number(paths), statuses([paths])
    reason = f" ({status.reason})" if status.reason and newest == number else ""
    say(f"attempt {newest if newest > number else newest + 1}: starting{reason}")


def _to_json(paths: RunPaths, log: Path, attempt: int | None, rank: int | None, lines: list[str]) -> Log:
    logs = [
        LogFile(attempt=folder.number, rank=number, file=str(file.absolute()), bytes=file.stat().st_size)
        for folder in paths.attempt_folders()
        for number, file in sorted(folder.files_of_ranks(".log").items())
        if file.is_file()
    ]
    return Log(
        id=paths.folder.name,
        name=paths.siblings.folder.name,
        path=str(paths.folder.absolute()),
        file=str(log.absolute()),
        attempt=attempt,
        rank=rank,
        lines=lines,
        logs=logs,
    )


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, or with 0 all."""
    with log.open("rb") as file:
        file.seek(_tail_offset(log, count) if count else 0)
        text = file.read().decode("utf-8", "replace")
    return text.removesuffix("\n").split("\n") if text else []


def _one_run(word: str, *, last: bool) -> RunPaths:
    matches = find_readable([word])
    if len(matches) == 1:
        return matches[0]
    if last:
        newest = max(matches, key=started)
        say(f"{run_name(newest)}: {in_words(changed_keys(matches)[newest])}")
        return newest
    raise UsageError(
        f"{word}: matches {len(matches)} runs, logs takes one; write its id, or add --last for the one that "
        f"started last:\n{listed_runs(matches)}"
    )


def listed_runs(matches: Sequence[RunPaths]) -> str:
    """Return a line per run with its id, its state and the values that distinguish it."""
    names, differences = run_names(matches), changed_keys(matches)
    rows = [[names[paths], read_status(paths).state, in_words(differences[paths])] for paths in matches]
    return "\n".join(f"  {line}" for line in columns(rows))


def _existing(paths: RunPaths, rank: int, attempt: int) -> Path:
    log = paths.attempt(attempt).log(rank)
    if log.is_file():
        return log
    if attempt == 0:
        (status,) = statuses([paths])
        if status.state in GOING_ON:
            raise UsageError(f"{run_name(paths)}: has not started yet; `logs -f` waits for it")
        reason = f": {status.reason}" if status.reason else ""
        raise UsageError(f"{run_name(paths)}: {status.state} before it started{reason}")
    newest = newest_number(paths)
    if attempt > newest:
        attempts = "attempt 1 alone" if newest == 1 else f"attempts 1 to {newest}"
        raise UsageError(f"{run_name(paths)}: there is no attempt {attempt}; the run has {attempts}")
    there = [path.name for path in paths.attempt(attempt).files_of_ranks(".log").values()]
    if not there and (cause := (read_json(paths.status) or {}).get("reason")):
        raise UsageError(f"{run_name(paths)}: attempt {attempt} has no log; {cause}")
    raise UsageError(
        f"{log}: there is no such log; attempt {attempt} has {', '.join(there) or 'none'}, "
        f"the newest attempt is {newest}"
    )


def _say_earlier(paths: RunPaths) -> None:
    """Print the newest attempt that trained, if the newest one has ended and did not train."""
    newest = newest_number(paths)
    record = read_record(paths.attempt(newest))
    if record is None or record.end is None or "first_step" in record.events:
        return
    for number in range(newest - 1, 0, -1):
        earlier = read_record(paths.attempt(number))
        if earlier is not None and "first_step" in earlier.events:
            saved = f" and saved step {earlier.saved_step}" if earlier.saved_step else ""
            say(f"attempt {newest} of {newest}; attempt {number} trained{saved}: --attempt {number}")
            return


def _follow(paths: RunPaths, rank: int, attempt: int | None, lines: int) -> None:
    """Print the last ``lines`` and new output until the run, or the requested attempt, has ended."""
    number = attempt or max(newest_number(paths), 1)
    reader, end = _LogReader(paths.attempt(number).log(rank), lines), _End(paths)
    while True:
        newest = newest_number(paths)
        has_ended = newest > number or end.has_come()
        # Read after the query, so that the last lines are not missed.
        if reader.print_new():
            continue
        if newest > number and attempt is None:
            say(f"attempt {newest} starts")
            number, reader = newest, _LogReader(paths.attempt(newest).log(rank))
        elif has_ended:
            break
        else:
            time.sleep(_POLL_S)
    if attempt is None and (output := launcher_of(paths).output(paths)):
        _LogReader(output).print_new()


class _End:
    """Whether a run has ended: reads the folder at each call, queries the scheduler occasionally."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._next_question = 0.0
        self._shown: str | None = None

    def has_come(self) -> bool:
        if read_status(self._paths).state not in GOING_ON:
            return True
        if time.monotonic() < self._next_question:
            return False
        (status,) = statuses([self._paths])
        self._next_question = time.monotonic() + _ASK_S
        text = f"{status.state}: {status.reason}" if status.reason and status.state != "running" else None
        if text and text != self._shown:
            say(f"{run_name(self._paths)}: {text}")
        self._shown = text
        return status.state not in GOING_ON


def _tail_offset(path: Path, lines: int) -> int:
    """Return where the last lines of a file begin; 0 if it has no more."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        offset, _ = next(islice(lines_from_end(file), lines - 1, None), (0, b""))
        return offset


class _LogReader:
    """Prints text appended to a file; a missing file counts as empty.

    ``lines``: how many of the existing lines are printed; 0: all.
    """

    def __init__(self, path: Path, lines: int = 0) -> None:
        self._path = path
        self._offset = _tail_offset(path, lines) if lines else 0
        if self._offset:
            say(f"{path}: the last {counted(lines, 'line')}; --all prints all of them")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def print_new(self) -> bool:
        """Return whether there was new output."""
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
