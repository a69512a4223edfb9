"""TensorBoard's event files and the CSV tables equal ``metrics.jsonl`` after kills and rollbacks."""

from __future__ import annotations

import csv
import io
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpc_train.loggers.csv_files import CsvLogger
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.loggers.tensorboard import TensorboardLogger
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from tests.loggers.wandb_files import context, row, scalars
from tests.waiting import HANG_LIMIT_S, came_true


def begin(run: RunPaths, attempt: int, step: int) -> MetricsWriter:
    """Start an attempt that resumes at ``step``."""
    of_attempt = context(run.folder, attempt)
    loggers = [TensorboardLogger(of_attempt), CsvLogger(of_attempt)]
    writer = MetricsWriter(MetricsFile(run.metrics, step), loggers, io.StringIO())
    writer.begin(step)
    return writer


def train(writer: MetricsWriter, attempt: int, steps: range, **more: float | None) -> None:
    for step in steps:
        writer.write(row("train", step, attempt) | {"accuracy": random.random()})
        if step % 3 == 0:
            writer.write(row("val", step, attempt) | more)


def attempt(run: RunPaths, number: int, resumed: int, last: int) -> None:
    """Run an attempt that resumes at ``resumed`` and commits ``last``."""
    writer = begin(run, number, resumed)
    train(writer, number, range(resumed + 1, last + 1))
    writer.committed(last)
    writer.close()


def killed(work: Callable[[], None]) -> None:
    """Do the work in a process that SIGKILL ends."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    ended = int(time.time())  # event files are read in the order of the second in which they began
    assert came_true(lambda: time.time() >= ended + 1, HANG_LIMIT_S)


def assert_equal_to_the_rows(run: RunPaths) -> None:
    rows = list(iter_rows(run.metrics))
    expected: dict[str, list[tuple[int, Any]]] = {}
    for each in rows:
        for name in each.keys() - {"time", "attempt", "split", "step", "epoch"}:
            if each[name] is not None:
                number = pytest.approx(each[name], rel=1e-6)  # events are float32
                expected.setdefault(f"{each['split']}/{name}", []).append((each["step"], number))
    assert scalars(run) == expected
    for split in ("train", "val"):
        with (run.csv / f"{split}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        of_split = [each for each in rows if each["split"] == split]
        assert [{name: float(text) for name, text in line.items() if text} for line in lines] == [
            {name: value for name, value in each.items() if name != "split" and value is not None}
            for each in of_split
        ]


def test_tables_and_events_after_a_kill_and_a_rollback(run: RunPaths) -> None:
    def first() -> None:
        writer = begin(run, 1, 0)
        train(writer, 1, range(1, 7))
        writer.committed(4)
        train(writer, 1, range(7, 9))

    killed(first)
    writer = begin(run, 2, 4)
    train(writer, 2, range(5, 12), ema_loss=0.5)
    writer.committed(8)
    train(writer, 2, range(12, 13))
    writer.go_back(8)
    train(writer, 2, range(9, 13), ema_loss=None)
    writer.committed(12)
    writer.close()
    assert {each["attempt"] for each in iter_rows(run.metrics)} == {1, 2}
    assert_equal_to_the_rows(run)


def test_rows_that_a_killed_attempt_did_not_flush_are_written_again(run: RunPaths) -> None:
    """The checkpoint of step 6 is committed, and before the loggers know, the process is killed."""
    killed(lambda: train(begin(run, 1, 0), 1, range(1, 7)))
    attempt(run, 2, 6, 9)
    assert_equal_to_the_rows(run)


def test_final_rows_are_withdrawn_if_their_checkpoint_is_damaged(run: RunPaths) -> None:
    attempt(run, 1, 0, 9)
    attempt(run, 2, 3, 6)
    assert_equal_to_the_rows(run)


def test_curves_show_rows_before_a_checkpoint_contains_them(run: RunPaths) -> None:
    writer = begin(run, 1, 0)
    train(writer, 1, range(1, 4))
    writer.close()
    assert [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3]
    assert not list(run.csv.glob("*"))
