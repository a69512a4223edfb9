"""The wandb logger: a separate process sends the rows, so that nothing that wandb does can affect the run.

wandb replaces ``sys.exit`` and ``sys.excepthook``, waits for its server at exit and blocks for minutes
without one. So this module never imports it; ``loggers.wandb_process`` does. What one attempt does not send
the next one does: ``metrics.jsonl`` has every row, ``loggers.wandb_history`` knows which were sent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hpc_train
from hpc_train.config.schema import WandbConfig
from hpc_train.loggers.base import LoggerContext, Row

#: How long ``close`` waits for wandb to send the remaining rows.
_CLOSE_LIMIT_S = 10.0
_KILLED_LIMIT_S = 1.0


class WandbLogger:
    """Tells the wandb process which rows of ``metrics.jsonl`` are final; that process reads them itself.

    Only the newest state waits for that process, so that a slow one costs neither memory nor rows.
    """

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.wandb
        assert settings is not None, "the wandb logger needs logging.wandb"
        self._start_message = _start_message(context, settings)
        self._warned = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        #: Not yet known to the process: ``committed``, ``newest``, ``end``.
        self._news: dict[str, Any] = {}
        self._has_news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Show the row's values as the run's newest; the curves show it once it is final."""
        self._tell(newest=row)

    def rows_committed(self, up_to_step: int) -> None:
        """Send the rows up to this step."""
        self._tell(committed=up_to_step)

    def close(self, state: str) -> None:
        """Give wandb ``_CLOSE_LIMIT_S`` to finish, then end it."""
        deadline = time.monotonic() + _CLOSE_LIMIT_S
        self._tell(end=0 if state == "completed" else 1)
        self._thread.join(_CLOSE_LIMIT_S)
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn(f"it did not finish within {_CLOSE_LIMIT_S:g} s")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._thread.join(_KILLED_LIMIT_S)

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
            self._process = process = _start_process()
        except OSError as error:
            self._warn(f"its process can't be started: {error}")
            return
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
            if process.wait() != 0:
                self._warn("its process ended")
            self._warned.set()  # otherwise it has reported the reason itself
        finally:
            with suppress(OSError):
                process.stdin.close()

    def _warn(self, what: str) -> None:
        if not self._warned.is_set():
            self._warned.set()
            print(warning(what), file=sys.stderr, flush=True)


def _start_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hpc_train.loggers.wandb_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=_environment(),
        start_new_session=True,  # Ctrl-C and a launcher's signals are handled by the rank
    )


def warning(what: str) -> str:
    """Return the line that reports wandb's failure."""
    return f"wandb: {what}; the run continues, and metrics.jsonl has every row"


def _environment() -> dict[str, str]:
    """Return an environment in which the process finds this copy of hpc_train, wherever it runs."""
    package = str(Path(hpc_train.__file__).parent.parent)
    before = os.environ.get("PYTHONPATH")
    path = f"{package}{os.pathsep}{before}" if before else package
    # A service started by an outer wandb run is not ours.
    own = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    return own | {"PYTHONPATH": path}


def _start_message(context: LoggerContext, settings: WandbConfig) -> dict[str, Any]:
    return {
        "mode": settings.mode,
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
