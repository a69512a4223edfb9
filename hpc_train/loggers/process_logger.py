"""A logger whose rows a separate process sends, so that a server can't affect the run.

The process runs ``loggers.sending.main``. The next attempt sends the rows that an attempt could not send:
``metrics.jsonl`` has every row, ``loggers.sent_rows`` records the sent rows.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpc_train.loggers.tracker_environment import Tracker, in_a_line
from hpc_train.package_path import with_package
from hpc_train.redaction import redacted
from hpc_train.run.processes import exit_code, start_in_own_session

#: How long ``close`` waits for the process to send the remaining rows.
_CLOSE_LIMIT_S = 10.0
#: How long ``close`` waits before that for a process that has not started yet, as on a busy node at the end
#: of a short run. Assumed.
_START_LIMIT_S = 60.0
#: How long it waits after that for the process to report missing rows, and for its end.
_REPORT_LIMIT_S = 4.0
_KILLED_LIMIT_S = 1.0


class ProcessLogger:
    """Sends the process the newest final step; the process reads the rows from ``metrics.jsonl`` itself.

    Only the newest state is queued, so that a slow process costs neither memory nor rows.
    """

    def __init__(
        self,
        name: str,
        module: str,
        start_message: dict[str, Any],
        environment: Mapping[str, str],
        *,
        waits_for_start: bool = False,
    ) -> None:
        """``name``: in warnings; ``module``: the program of the process, with this environment.

        ``waits_for_start``: if true, ``close`` gives the process ``_START_LIMIT_S`` to start; for a target
        that needs no server, since the start of any other may wait for one.
        """
        self._name = name
        self._module = module
        self._environment = environment
        self._start_message = start_message
        self._waits_for_start = waits_for_start
        self._warned = threading.Event()
        #: Cause of a failure of the process, for the warning.
        self._cause = "its process ended"
        self._process: subprocess.Popen[str] | None = None
        #: Not yet known to the process: ``committed``, ``newest``, ``end``.
        self._news: dict[str, Any] = {}
        self._has_news = threading.Condition()
        #: Both ends of the pipe to which the process writes once it has started.
        self._started, self._starting = os.pipe()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def rows_committed(self, up_to_step: int) -> None:
        """Send the rows up to this step."""
        self._tell(committed=up_to_step)

    def close(self, state: str) -> None:
        """Give the process ``_CLOSE_LIMIT_S`` to finish, then have it report the missing rows, and end it."""
        self._tell(end=0 if state == "completed" else 1)
        has_started = self._wait_for_start()
        os.close(self._started)
        deadline = time.monotonic() + (_CLOSE_LIMIT_S if has_started else 0.0)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._cause = f"it did not finish within {_CLOSE_LIMIT_S:g} s"
            if not has_started:
                self._cause = f"its process did not start within {_START_LIMIT_S:g} s"
            os.kill(self._process.pid, signal.SIGALRM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REPORT_LIMIT_S)
            with suppress(ProcessLookupError):  # the service's client may still run
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._thread.join(_KILLED_LIMIT_S)
        if self._process.returncode != 0:
            self._warn(self._cause)

    @property
    def close_limit_s(self) -> float:
        """Maximum duration of ``close``."""
        start_limit_s = _START_LIMIT_S if self._waits_for_start else 0.0
        return start_limit_s + _CLOSE_LIMIT_S + _REPORT_LIMIT_S + _KILLED_LIMIT_S

    def _wait_for_start(self) -> bool:
        """Return False if the process has not started within ``_START_LIMIT_S``; True without waiting if its
        start may need a server.
        """
        if not self._waits_for_start:
            return True
        poll = select.poll()  # unlike select, for descriptors above 1,023 too
        poll.register(self._started, select.POLLIN)  # also readable if the process has ended
        return bool(poll.poll(_START_LIMIT_S * 1000))

    def _tell(self, **news: Any) -> None:
        with self._has_news:
            self._news |= news
            self._has_news.notify()

    def _next_news(self) -> dict[str, Any]:
        with self._has_news:
            self._has_news.wait_for(lambda: self._news)
            news, self._news = self._news, {}
        return news

    def _run(self) -> None:
        """Send changes to the process until the end, or until it is gone."""
        try:
            self._process = process = _start_process(self._module, self._environment, self._starting)
        except OSError as error:
            self._warn(f"its process can't be started: {error}")
            return
        finally:
            os.close(self._starting)
        assert process.stdin is not None
        try:
            news = self._start_message
            while True:
                process.stdin.write(json.dumps(news) + "\n")
                process.stdin.flush()
                if "end" in news:
                    return
                news = self._next_news()
        except OSError:
            if exit_code(process, block=True) != 0:
                self._warn(self._cause)
            self._warned.set()  # otherwise it has reported the reason itself
        finally:
            with suppress(OSError):
                process.stdin.close()

    def _warn(self, problem: str) -> None:
        if not self._warned.is_set():
            self._warned.set()
            print(warning(self._name, problem, self._start_message["run_id"]), file=sys.stderr, flush=True)


def _start_process(module: str, environment: Mapping[str, str], started: int) -> subprocess.Popen[str]:
    return start_in_own_session(  # Ctrl-C and a launcher's signals are handled by the rank
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=started,
        text=True,
        env=with_package(environment),
    )


def print_environment(tracker: Tracker) -> None:
    """Print the shell variables that the tracker uses or ignores, if there are any."""
    if line := in_a_line(tracker, os.environ):
        print(line, flush=True)


def notice(name: str, problem: str) -> str:
    """Return the line that reports a failure after which the attempt may still send all rows."""
    return redacted(f"{name}: {problem}; the run continues, and metrics.jsonl has every row")


def warning(name: str, problem: str, run_id: str) -> str:
    """Return the line that reports why an attempt's rows were not sent, with the command that sends them."""
    return redacted(f"{notice(name, problem)}, which this sends: hpc-train sync {run_id}")
