"""``python -m hpc_train.loggers.sending_process``: the process that sends a run's rows to one tracker.

It reads one JSON object per line from stdin: first the settings, then any of ``committed`` (the step up to
which rows are final), ``newest`` (a row that is not final yet) and, last, ``end`` (0 if the run has
completed, 1 if the attempt has ended otherwise, null if the run continues).

For an attempt it writes a line to stdout once it has started, reports the first failure and at the end the
number of missing rows on stderr, and ends with its input, or at SIGALRM. For ``sync`` it answers by one JSON
object on stdout: ``rows_sent``, ``target`` and ``notes``, or ``error``; it is killed once its input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

from hpc_train.loggers.process_logger import notice, warning
from hpc_train.loggers.sending import ORPHAN_LIMIT_S, BusyError, Mirror, check_version, in_a_line
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import unusable_lines

_MIRRORS = {
    "wandb": "hpc_train.loggers.wandb:WandbMirror",
    "mlflow": "hpc_train.loggers.mlflow:MlflowMirror",
    "tensorboard": "hpc_train.loggers.tensorboard:EventFilesMirror",
}
_BUSY = "another process sends the run's rows: another sync, or an attempt that trains and sends them itself"
#: Lines of the file that are named.
_MAX_NOTES = 10


class _Input(threading.Thread):
    """Reads stdin, so that the newest step is known while the mirror waits. None ends ``news``."""

    def __init__(self, *, is_sync: bool = False) -> None:
        super().__init__(daemon=True)
        self.news: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.committed_step = -1
        self._is_sync = is_sync

    def run(self) -> None:
        with suppress(ValueError):  # the rank was killed while it wrote a line
            for line in sys.stdin:
                news = json.loads(line)
                self.committed_step = news.get("committed", self.committed_step)
                self.news.put(news)
        if self._is_sync:  # the command has ended; the tracker's client ends with this process
            os.killpg(os.getpgid(0), signal.SIGKILL)
        self.news.put(None)


def main() -> NoReturn:
    """Send the rows that stdin requests.

    stdout and stderr are redirected to /dev/null for the tracker's client; the process exits without its
    exit handlers, which would wait for unsent data.
    """
    output, errors = (os.fdopen(os.dup(number), "w", encoding="utf-8") for number in (1, 2))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    settings = json.loads(next(sys.stdin))
    if settings.get("is_sync"):
        print(json.dumps(_sync(settings)), file=output, flush=True)
        os._exit(0)
    _mirror_attempt(settings, output, errors)


def _mirror_attempt(settings: dict[str, Any], output: TextIO, errors: TextIO) -> NoReturn:
    # A job's signals reach all of its processes; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def report(problem: str) -> None:
        print(notice(settings["to"], problem), file=errors, flush=True)

    def end(problem: str | None = None) -> NoReturn:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one report is enough
        if (missing := mirror.missing(read.committed_step, problem)) is not None:
            print(warning(settings["to"], missing, settings["run_id"]), file=errors, flush=True)
        elif problem is not None:
            mirror.report_once(problem)
        os._exit(0)

    mirror: Mirror = resolve_name(_MIRRORS[settings["to"]])(settings, report)
    read = _Input()
    read.start()
    signal.signal(signal.SIGALRM, lambda *_: end("it did not answer in time"))
    try:
        check_version(settings["to"])
        mirror.begin()
        with suppress(OSError):  # the rank was killed
            print("started", file=output, flush=True)
        _send(mirror, read.news)
    except Exception as error:
        end(in_a_line(error))
    end()


def _send(mirror: Mirror, news: SimpleQueue[dict[str, Any] | None]) -> None:
    while (changes := news.get()) and "end" not in changes:
        _apply(mirror, changes)
    if changes is None:  # the rank was killed
        signal.alarm(ORPHAN_LIMIT_S)
        mirror.finish(None)
    else:
        _apply(mirror, changes)
        mirror.finish(changes["end"])


def _apply(mirror: Mirror, changes: dict[str, Any]) -> None:
    if "committed" in changes:
        mirror.send(changes["committed"])
    if "newest" in changes:
        mirror.show(changes["newest"])


def _sync(settings: dict[str, Any]) -> dict[str, Any]:
    read = _Input(is_sync=True)
    read.start()
    notes: list[str] = []
    try:
        check_version(settings["to"])
        mirror: Mirror = resolve_name(_MIRRORS[settings["to"]])(settings, notes.append)
        mirror.begin()
        _send(mirror, read.news)
        if (problem := mirror.missing(read.committed_step)) is not None:
            return {"error": problem}
        notes += _unsent(settings, read.committed_step)
        return {"rows_sent": mirror.num_sent, "target": mirror.target, "notes": notes}
    except BusyError:
        settings.pop("scratch", None)  # the files belong to the process that has the lock
        return {"error": _BUSY}
    except ModuleNotFoundError as error:
        return {"error": f"{error.name} is not installed; type pip install 'hpc-train[{settings['to']}]'"}
    except Exception as error:  # any error of clients, servers or disks
        return {"error": in_a_line(error)}
    finally:
        if "scratch" in settings:
            shutil.rmtree(settings["scratch"], ignore_errors=True)


def _unsent(settings: dict[str, Any], step: int) -> list[str]:
    """Return a line per line of ``metrics.jsonl`` that could not be sent, and how many more there are."""
    metrics = RunPaths(Path(settings["folder"])).metrics
    lines = [
        f"{metrics.name}: line {number} {problem} and is not sent"
        for number, problem in unusable_lines(metrics, step, needs_time=settings["to"] != "wandb")
    ]
    more = [f"{metrics.name}: {len(lines) - _MAX_NOTES} more lines are not sent"]
    return lines if len(lines) <= _MAX_NOTES else lines[:_MAX_NOTES] + more


if __name__ == "__main__":
    main()
