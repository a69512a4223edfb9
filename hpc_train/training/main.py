"""One rank, from its start to its exit code: joins the others, trains, and reports how it ended.

Called by ``launchers.entry`` on every rank. Every error becomes an exit code and, unless another rank is the
cause, a ``rank-<r>.error`` file that the launcher and ``status`` show.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts
from hpc_train.registry import split_name, target_of
from hpc_train.run.attempts import read_record
from hpc_train.run.create import training_experiment
from hpc_train.run.storage_errors import TRANSIENT, retried
from hpc_train.training import build, evaluation, rank_exit, replaying
from hpc_train.training.rank import joined


def run(paths: RunPaths, attempt: int) -> ExitCode:
    """Run one rank of one attempt to its end. Returns the process's exit code; never raises."""
    flag = signals.install(_earliest_warning(paths, attempt))
    facts = RankFacts()
    sys.stdout, sys.stderr = (tolerant(stream) for stream in (sys.stdout, sys.stderr))
    try:
        facts = RankFacts.from_environment(os.environ)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO if facts.rank == 0 else logging.WARNING)
        with joined(paths, attempt, facts, flag) as rank:
            if paths.replayed_steps.is_file():
                return replaying.replay(rank)
            is_evaluation = paths.evaluated_checkpoint.is_file()
            return evaluation.evaluate_checkpoint(rank) if is_evaluation else build.train(rank)
    except BaseException as error:
        return rank_exit.report(error, paths, attempt, facts, flag)


def import_parts(paths: RunPaths, attempt: int) -> None:
    """Import the built-in parts that the run's file names, such as timm, for a rank on standby.

    Modules of the user's are not imported: they may use the GPU. Errors are left to the attempt.
    """
    with suppress(Exception):
        experiment = training_experiment(paths, attempt)
        names = {
            "models": experiment.model.name,
            "datasets": experiment.data.name,
            "tasks": experiment.task,
            "strategies": experiment.parallel.strategy,
        }
        for kind, name in names.items():
            target = target_of(kind, split_name(name)[0]) or ""
            if target.startswith("hpc_train."):
                importlib.import_module(target.partition(":")[0])


def _earliest_warning(paths: RunPaths, attempt: int) -> float:
    """Return the earliest time of the scheduler's warning about the time limit, in seconds since 1970."""
    record = read_record(paths.attempt(attempt), with_events=False)
    if record is None or record.time_limit_s is None or record.lead_s is None:
        return 0.0
    began = datetime.fromisoformat(record.events.get("begin", record.start)).timestamp()
    return began + record.time_limit_s - record.lead_s


def tolerant(stream: Any) -> Any:
    """Return a text stream to the same file whose writes survive temporary errors of a file server."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed by the parent process, or not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LogFile(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LogFile(io.RawIOBase):
    """Retries a failed write, and drops it if the error persists; other errors are raised."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        text = bytes(data)
        try:
            if not self._dropped:
                return retried(lambda: os.write(self._descriptor, text), Path("log"), tells=False)
            # The first failure has been retried with pauses; training must not wait for every line.
            os.write(self._descriptor, b"(%d bytes of this log could not be written)\n" % self._dropped)
            self._dropped = 0
            return os.write(self._descriptor, text)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            self._dropped += len(text)
            return len(text)
