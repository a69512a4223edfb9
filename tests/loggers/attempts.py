"""Attempts of a run whose rows a process sends, and what happens to them."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path

from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.loggers.process_logger import ProcessLogger
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile
from tests.loggers.wandb_files import row
from tests.waiting import HANG_LIMIT_S, came_true

#: Returns the logger of an attempt of this number.
Make = Callable[[int], ProcessLogger]


class Attempt:
    """Rank 0's recorder of one attempt."""

    def __init__(self, run: RunPaths, number: int, resumed_step: int, make: Make) -> None:
        self._number = number
        self._salt = number * 10
        self._logger = make(number)
        self._metrics_writer = MetricsWriter(
            MetricsFile(run.metrics, resumed_step),
            [self._logger],
            io.StringIO(),  # type: ignore[list-item]
        )
        self._metrics_writer.begin(resumed_step)

    def train(self, *steps: int, saved: int | None = None) -> None:
        for step in steps:
            self._write("train", step)
            if step % 2 == 0:
                self._write("val", step)
        if saved is not None:
            self._metrics_writer.committed(saved)

    def _write(self, split: str, step: int) -> None:
        self._metrics_writer.write(row(split, step, self._number) | {"loss": step + self._salt})

    def roll_back(self, step: int) -> None:
        self._metrics_writer.go_back(step)
        self._salt += 1

    def end(self, state: str) -> None:
        self._metrics_writer.state = state
        self._metrics_writer.close()
        assert self._logger._process is not None and self._logger._process.returncode == 0

    @property
    def has_ended(self) -> bool:
        """Whether the logger's process has."""
        return self._logger._process is not None and self._logger._process.poll() is not None

    def kill(self, kills_process: bool) -> None:
        process = self._logger._process
        assert process is not None and process.stdin is not None
        if kills_process:
            os.killpg(process.pid, signal.SIGKILL)
        else:  # its input ends, as where the rank dies
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), process.stdin.fileno())
        process.wait()


def preempted_killed_and_rolled_back(run: RunPaths, make: Make, has_rows: Callable[[int], bool]) -> None:
    first = Attempt(run, 1, 0, make)
    first.train(*range(1, 9), saved=5)
    first.kill(kills_process=False)
    second = Attempt(run, 2, 5, make)
    second.train(*range(6, 13), saved=10)
    assert came_true(lambda: has_rows(8), limit_s=HANG_LIMIT_S)
    second.kill(kills_process=True)
    third = Attempt(run, 3, 10, make)
    third.train(11, 12, 13)
    third.roll_back(10)
    third.train(11, 12, saved=12)
    third.end("failed")
    fourth = Attempt(run, 4, 12, make)
    fourth.train(13, 14, 15)
    fourth.roll_back(12)
    fourth.train(13, 14, 15, 16, saved=16)
    fourth.end("completed")
