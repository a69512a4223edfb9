"""wandb as a logger: rows go to a process of their own, where nothing that wandb does can touch the run.

wandb replaces ``sys.exit`` and ``sys.excepthook``, waits for its server at exit and blocks for minutes where
there is none. So this module never imports it; ``loggers.wandb_process`` does. What is not sent is not lost:
``metrics.jsonl`` has every row.
"""

from __future__ import annotations

import json
import os
import queue
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

#: Rows that wait while wandb starts or its server is slow; later ones are dropped. Assumed.
_MOST_WAITING = 10_000
#: How long ``close`` waits for wandb to send what it has.
_CLOSE_LIMIT_S = 10.0
_KILLED_LIMIT_S = 1.0
_END = None


class WandbLogger:
    """Hands rows to a thread, which starts the process that talks to wandb and writes them to it."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.wandb
        assert settings is not None, "the wandb logger is made only where the file has logging.wandb"
        self._warned = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._put(_start_message(context, settings))
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Take one row; returns at once, and drops it where wandb is thousands of rows behind."""
        self._put({"row": row})

    def close(self, state: str) -> None:
        """Give wandb ``_CLOSE_LIMIT_S`` to finish, then end it."""
        deadline = time.monotonic() + _CLOSE_LIMIT_S
        end = json.dumps({"end": 0 if state == "completed" else 1})
        with suppress(queue.Full):
            for last in (end, _END) if self._thread.is_alive() else ():
                self._waiting.put(last, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn(f"it did not finish within {_CLOSE_LIMIT_S:g} s")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._thread.join(_KILLED_LIMIT_S)

    def _put(self, message: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(json.dumps(message))
        except queue.Full:
            self._warn(f"it is {_MOST_WAITING} rows behind")

    def _run(self) -> None:
        """Write what waits to the process until the end, or until it is gone."""
        try:
            self._process = process = _start_process()
        except OSError as error:
            self._warn(f"its process can't be started: {error}")
            return
        assert process.stdin is not None
        try:
            while (line := self._waiting.get()) is not _END:
                process.stdin.write(line + "\n")
                process.stdin.flush()
        except OSError:
            if process.wait() != 0:
                self._warn("its process ended")
            self._warned.set()  # else it has said why itself
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
        start_new_session=True,  # Ctrl-C and a launcher's signals are the rank's business
    )


def warning(what: str) -> str:
    """Return the one line that tells of wandb's failure."""
    return f"wandb: {what}; the run goes on, and metrics.jsonl has every row"


def _environment() -> dict[str, str]:
    """Return an environment in which the process finds this very hpc_train, wherever it runs."""
    package = str(Path(hpc_train.__file__).parent.parent)
    before = os.environ.get("PYTHONPATH")
    path = f"{package}{os.pathsep}{before}" if before else package
    # A service that an outer wandb run started is not ours.
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
