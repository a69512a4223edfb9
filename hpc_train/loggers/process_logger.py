"""A logger whose rows a separate process sends, so that a tracker can't affect the run; and that process.

wandb replaces ``sys.exit`` and ``sys.excepthook``, waits for its server at exit and blocks for minutes
without one. Importing MLflow takes seconds, and a server that does not answer blocks it. So only the process,
``python -m hpc_train.loggers.process_logger``, imports them. The next attempt sends the rows that an attempt
could not send: ``metrics.jsonl`` has every row, ``loggers.sending`` records the sent rows.

The process reads one JSON object per line from stdin: first the settings, then any of ``committed`` (the step
up to which rows are final), ``newest`` (a row that is not final yet) and, last, ``end`` (0 if the run has
completed, 1 if the attempt has ended otherwise, null if the run continues).

For an attempt it writes a line to stdout once it has started, reports the first failure and at the end the
number of missing rows on stderr, and ends with its input, or at SIGALRM. For ``sync`` it answers by one JSON
object on stdout: ``rows_sent``, ``target`` and ``notes``, or ``error``; it is killed once its input ends.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import IO, Any, NoReturn, TextIO

from hpc_train.console import one_line
from hpc_train.experiment.config.schema import MlflowConfig, WandbConfig
from hpc_train.loggers import tracker_environment
from hpc_train.loggers.base import LoggerContext, LoggerOffError, Row
from hpc_train.loggers.sending import ORPHAN_LIMIT_S, BusyError, Mirror, check_version, in_a_line
from hpc_train.package_path import with_package
from hpc_train.paths import RunPaths
from hpc_train.redaction import redacted
from hpc_train.run.metric_rows import unusable_lines
from hpc_train.run.processes import exit_code, start_in_own_session

#: How long ``close`` waits for the process to send the remaining rows.
_CLOSE_LIMIT_S = 10.0
#: How long ``close`` waits before that for a process that has not started yet, as on a busy node at the end
#: of a short run. Assumed.
_START_LIMIT_S = 60.0
#: How long it waits after that for the process to report missing rows, and for its end.
_REPORT_LIMIT_S = 4.0
_KILLED_LIMIT_S = 1.0
#: Defaults, which the environment overrides. The client does not retry a request, since it can't know whether
#: the first one arrived; failed rows are sent at the next commit.
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # Another host, such as a captive portal, would accept the rows, and they would be recorded as sent.
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Folders need no server and no database, and MLflow refuses them otherwise.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class ProcessLogger:
    """Sends the process the newest final step; the process reads the rows from ``metrics.jsonl`` itself.

    Writing never waits, and only the newest state is queued, so that a slow process costs neither time nor
    memory nor rows.
    """

    def __init__(
        self, settings: dict[str, Any], environment: Mapping[str, str], *, waits_for_start: bool = False
    ) -> None:
        """``settings``: the first line of the process's input; ``environment``: its environment.

        ``waits_for_start``: if true, ``close`` gives the process ``_START_LIMIT_S`` to start; for a target
        that needs no server, since the start of any other may wait for one.
        """
        if line := tracker_environment.in_a_line(settings["to"], os.environ):
            print(line, flush=True)  # the shell variables that the tracker uses or ignores
        self._settings = settings
        self._waits_for_start = waits_for_start
        self._has_warned = False
        #: Not yet written: ``committed``, ``newest``, ``end``; and the rest of a line that is being written.
        self._news: dict[str, Any] = {}
        self._unwritten = b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = start_process(environment)
        except OSError as error:
            self._warn(f"its process can't be started: {error}")
        else:
            os.set_blocking(_pipe(self._process.stdin).fileno(), False)
            self._send(**settings)

    def rows_committed(self, up_to_step: int) -> None:
        """Send the rows up to this step."""
        self._send(committed=up_to_step)

    def close(self, state: str) -> None:
        """Give the process ``_CLOSE_LIMIT_S`` to finish, then have it report the missing rows, and end it."""
        if self._process is None:
            return
        deadline = time.monotonic() + (_START_LIMIT_S if self._waits_for_start else _CLOSE_LIMIT_S)
        self._send(end=0 if state == "completed" else 1)
        while self._unwritten and _is_ready(self._process.stdin, select.POLLOUT, deadline):
            self._write()
        problem = f"it did not finish within {_CLOSE_LIMIT_S:g} s"
        if self._waits_for_start:
            if _is_ready(self._process.stdout, select.POLLIN, deadline):  # also if the process has ended
                deadline = time.monotonic() + _CLOSE_LIMIT_S
            else:
                problem = f"its process did not start within {_START_LIMIT_S:g} s"
        self._end(self._process, deadline, problem)

    def _end(self, process: subprocess.Popen[bytes], deadline: float, problem: str) -> None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
            problem = "its process ended"
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGALRM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REPORT_LIMIT_S)
            with suppress(ProcessLookupError):  # the tracker's client may still run
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            _pipe(pipe).close()
        if process.returncode != 0:
            self._warn(problem)

    @property
    def close_limit_s(self) -> float:
        """Maximum duration of ``close``."""
        start_limit_s = _START_LIMIT_S if self._waits_for_start else 0.0
        return start_limit_s + _CLOSE_LIMIT_S + _REPORT_LIMIT_S + _KILLED_LIMIT_S

    def _send(self, **news: Any) -> None:
        self._news |= news
        self._write()

    def _write(self) -> None:
        """Write news until all are written, the pipe is full, or the process has ended."""
        while self._process is not None and (self._unwritten or self._news):
            if not self._unwritten:
                self._unwritten, self._news = json.dumps(self._news).encode() + b"\n", {}
            try:
                written = os.write(_pipe(self._process.stdin).fileno(), self._unwritten)
            except BlockingIOError:
                return
            except OSError:
                self._unwritten, self._news = b"", {}
                if exit_code(self._process, block=True) != 0:  # otherwise it has reported the reason itself
                    self._warn("its process ended")
                return
            self._unwritten = self._unwritten[written:]

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            line = warning(self._settings["to"], problem, self._settings["run_id"])
            print(line, file=sys.stderr, flush=True)


class WandbLogger(ProcessLogger):
    """Shows the newest row as the run's newest values; the curves show it once it is final."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.wandb
        assert settings is not None, "the wandb logger needs logging.wandb"
        if invalid := tracker_environment.invalid_mode():
            problem = f"WANDB_MODE={invalid} is not a mode and is ignored"
            print(notice("wandb", problem), file=sys.stderr, flush=True)
        message = wandb_settings(context, settings)
        if message["mode"] == "disabled":
            raise LoggerOffError("turned off by WANDB_MODE or WANDB_DISABLED; `mode: online` overrides them")
        super().__init__(message, wandb_environment(), waits_for_start=message["mode"] == "offline")

    def log(self, row: Row) -> None:
        """Show the row's values."""
        self._send(newest=row)


def wandb_environment() -> dict[str, str]:
    """Return the environment of a process that talks to wandb.

    It contains the server's address, since wandb ignores its settings file if a line is invalid, but not the
    mode, which is in the start message.
    """
    address = {"WANDB_BASE_URL": url} if (url := tracker_environment.base_url()) else {}
    passed = tracker_environment.passed_on("wandb", os.environ)
    return {name: passed[name] for name in passed.keys() - {"WANDB_MODE", "WANDB_DISABLED"}} | address


def wandb_settings(context: LoggerContext, settings: WandbConfig) -> dict[str, Any]:
    """Return the settings for the process; the API key is only in its environment."""
    return {
        "to": "wandb",
        "mode": tracker_environment.effective_mode(settings.mode),
        "run_id": context.run_id,
        "folder": str(context.paths.folder.absolute()),
        "init": {
            "project": settings.project,
            "entity": settings.entity,
            "tags": settings.tags,
            "id": context.wandb_id,
            "name": context.run_id,
            "group": context.experiment.name,
            "config": context.experiment.model_dump(mode="json"),
        },
    }


class MlflowLogger(ProcessLogger):
    """One MLflow run over all attempts: the experiment as its parameters, final rows as its metrics."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.mlflow
        assert settings is not None, "the mlflow logger needs logging.mlflow"
        super().__init__(mlflow_settings(context, settings), mlflow_environment())

    def log(self, row: Row) -> None:
        """Do nothing: MLflow can't withdraw a row that is not final."""


def mlflow_environment() -> dict[str, str]:
    """Return the environment of a process that talks to MLflow."""
    return MLFLOW_DEFAULTS | tracker_environment.passed_on("mlflow", os.environ)


def mlflow_settings(context: LoggerContext, settings: MlflowConfig) -> dict[str, Any]:
    """Return the settings for the process; credentials are only in its environment."""
    return {
        "to": "mlflow",
        "run_id": context.run_id,
        "folder": str(context.paths.folder.absolute()),
        "tracking_uri": settings.tracking_uri,
        "experiment": settings.experiment or context.experiment.name,
        "id": context.wandb_id,
        "name": context.run_id,
        "params": context.experiment.model_dump(mode="json"),
    }


def start_process(environment: Mapping[str, str], **pipes: Any) -> subprocess.Popen[bytes]:
    """Start the process that sends rows, with pipes for its input and output."""
    return start_in_own_session(  # Ctrl-C and a launcher's signals are handled by the rank
        [sys.executable, "-P", "-m", "hpc_train.loggers.process_logger"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_package(environment),
        **pipes,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _is_ready(pipe: IO[bytes] | None, event: int, deadline: float) -> bool:
    """Wait until the pipe is ready or broken; False after the deadline."""
    poll = select.poll()  # unlike select, for descriptors above 1,023 too
    poll.register(_pipe(pipe), event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def notice(name: str, problem: str) -> str:
    """Return the line that reports a failure after which the attempt may still send all rows."""
    return one_line(redacted(f"{name}: {problem}; the run continues, and metrics.jsonl has every row"))


def warning(name: str, problem: str, run_id: str) -> str:
    """Return the line that reports why an attempt's rows were not sent, with the command that sends them."""
    return redacted(f"{notice(name, problem)}, which this sends: hpc-train sync {run_id}")


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
