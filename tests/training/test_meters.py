"""Rows and ``status.json``: what is written when, and what is never waited for."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.errors import HpcTrainError
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.paths import RunPaths
from hpc_train.run import run_status as status_module
from hpc_train.run import storage_errors
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from hpc_train.run.run_status import read_status
from hpc_train.training import meters
from hpc_train.training.meters import STATUS_EVERY_S, Meters, StatusWriter, SupersededError

pytestmark = pytest.mark.usefixtures("one_rank_group")


@dataclass
class FakeCopy:
    """A copy from a device that arrives when the test says so."""

    values: Tensor
    is_ready: bool = False
    was_waited_for: bool = False

    def tensors(self) -> tuple[Tensor]:
        self.was_waited_for = not self.is_ready
        self.is_ready = True
        return (self.values,)


def wait_for(writer: StatusWriter) -> None:
    """Return when its thread has written."""
    while writer._in_background.is_under_way:
        time.sleep(0.001)


@dataclass
class Noting:
    """A logger that remembers."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    state: str | None = None

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self, state: str) -> None:
        self.state = state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[FakeCopy]:
    """Let every train row wait for a copy of its own; return them in the rows' order."""
    made: list[FakeCopy] = []

    def copy(values: Tensor) -> FakeCopy:
        made.append(FakeCopy(values))
        return made[-1]

    monkeypatch.setattr(meters, "HostCopy", copy)
    return made


@pytest.fixture
def writer(path: Path) -> Iterator[MetricsWriter]:
    made, _ = make_metrics_writer(path)
    yield made
    made.close()


@pytest.fixture
def run_meters(writer: MetricsWriter) -> Meters:
    return make_meters(writer)


def make_metrics_writer(path: Path, *loggers: Noting) -> tuple[MetricsWriter, io.StringIO]:
    log = io.StringIO()
    return MetricsWriter(MetricsFile(path, 0), list(loggers), log), log


def make_meters(metrics_writer: MetricsWriter | None, every_steps: int = 1) -> Meters:
    sizes = {"global_batch_size": 48, "steps_per_epoch": 10}
    return Meters(attempt=3, **sizes, every_steps=every_steps, metrics_writer=metrics_writer)


def status_writer(paths: RunPaths) -> StatusWriter:
    return StatusWriter(paths, attempt=1, total_steps=40, steps_per_epoch=10)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def places(path: Path) -> list[tuple[str, int]]:
    return [(row["split"], row["step"]) for row in iter_rows(path)]


def test_rows_are_due_every_so_many_steps() -> None:
    run_meters = make_meters(None, every_steps=4)
    assert [step for step in range(1, 13) if run_meters.train_row_is_due(step)] == [4, 8, 12]


def test_a_train_row_says_where_and_what(path: Path, run_meters: Meters) -> None:
    run_meters.train_row(25, 0.1, number(1.5), torch.tensor(2.5))
    (row,) = list(iter_rows(path))
    assert row.pop("time") > 0
    assert row == {
        "attempt": 3, "split": "train", "step": 25, "epoch": 2.5, "lr": 0.1, "loss": 1.5, "grad_norm": 2.5,
    }  # fmt: skip


def test_throughput_is_counted_from_the_row_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, run_meters: Meters
) -> None:
    clock = iter([100.0, 102.0])
    monkeypatch.setattr("hpc_train.training.step_times.time.monotonic", lambda: next(clock))
    run_meters.train_row(10, 0.1, number(1.0), None)
    run_meters.train_row(15, 0.1, number(1.0), None)
    first, second = list(iter_rows(path))
    assert "samples_per_s" not in first
    assert second["samples_per_s"] == 5 * 48 / 2


def test_a_row_is_not_waited_for_before_its_numbers_are_there(
    path: Path, copies: list[FakeCopy], run_meters: Meters
) -> None:
    for step in (1, 2, 3):
        run_meters.train_row(step, 0.1, number(1.0), None)
    assert places(path) == []
    copies[1].is_ready = True
    run_meters.drain(wait=False)
    assert places(path) == [], "rows keep their order"
    copies[0].is_ready = True
    run_meters.drain(wait=False)
    assert places(path) == [("train", 1), ("train", 2)]
    assert not any(event.was_waited_for for event in copies)


def test_a_val_row_follows_earlier_train_rows(path: Path, copies: list[FakeCopy], run_meters: Meters) -> None:
    run_meters.train_row(1, 0.1, number(1.0), None)
    run_meters.val_row(1, {"loss": 0.5, "accuracy": 0.25})
    assert places(path) == [("train", 1), ("val", 1)]
    assert copies[0].was_waited_for
    assert run_meters.has_val_row(1)
    assert not run_meters.has_val_row(2)
    run_meters.train_row(2, 0.1, number(1.0), None)
    run_meters.drain(wait=True)
    run_meters.sync()
    assert places(path)[2:] == [("train", 2)], "waiting leaves no row behind"


def test_other_ranks_write_nothing(copies: list[FakeCopy]) -> None:
    run_meters = make_meters(None)
    run_meters.train_row(1, 0.1, number(1.0), None)
    run_meters.val_row(1, {"loss": 1.0})
    run_meters.sync()
    assert copies == []
    assert not run_meters.has_val_row(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("split", "key"), [("train", "loss"), ("train", "grad_norm"), ("val", "loss")])
def test_a_number_that_is_not_finite_is_null(split: str, key: str, value: float, path: Path) -> None:
    noting = Noting()
    metrics_writer, log = make_metrics_writer(path, noting)
    run_meters = make_meters(metrics_writer)
    if split == "val":
        run_meters.val_row(7, {"loss": value})
    else:
        numbers = {"loss": number(1.0), "grad_norm": torch.tensor(1.0)} | {key: number(value)}
        run_meters.train_row(7, 0.1, *numbers.values())
    assert [row[key] for row in iter_rows(path)] == [None] == [row[key] for row in noting.rows]
    assert key == "loss" or key not in log.getvalue()
    metrics_writer.close()
    assert noting.state == "failed", "of a run that breaks"


def test_going_back_drops_rows_past_the_step(path: Path, run_meters: Meters, writer: MetricsWriter) -> None:
    for step in (1, 2, 3):
        run_meters.train_row(step, 0.1, number(1.0), None)
    writer.go_back(1)
    assert places(path) == [("train", 1)]
    make_meters(writer).train_row(2, 0.1, number(2.0), None)
    assert places(path) == [("train", 1), ("train", 2)]


def test_loggers_and_the_log_receive_every_row_and_the_end(path: Path) -> None:
    noting = Noting()
    metrics_writer, log = make_metrics_writer(path, noting)
    make_meters(metrics_writer).val_row(20, {"loss": 0.123456, "accuracy": 0.5})
    metrics_writer.state = "completed"
    metrics_writer.close()
    assert noting.rows == list(iter_rows(path))
    assert noting.state == "completed"
    assert log.getvalue() == "val step 20 epoch 2 loss 0.12346 accuracy 0.5\n"


@dataclass
class Breaking(Noting):
    """A logger that raises at its second row."""

    calls: int = 0

    def log(self, row: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("its server is gone")
        super().log(row)


def test_a_logger_that_raises_is_dropped_and_no_more(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    breaking, noting = Breaking(), Noting()
    metrics_writer, _ = make_metrics_writer(path, breaking, noting)
    for step in (1, 2, 3):
        make_meters(metrics_writer).train_row(step, 0.1, number(1.0), None)
    metrics_writer.close()
    assert [row["step"] for row in noting.rows] == [1, 2, 3]
    assert breaking.calls == 2, "it is not asked again"
    assert breaking.state is None
    assert noting.state == "failed"
    assert caplog.text.count("logger Breaking failed and is disabled") == 1


def test_status_is_written_no_more_often_than_somebody_could_read_it(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("hpc_train.training.meters.time.monotonic", lambda: now)
    writer = status_writer(paths)
    for step, after_s in enumerate((0.0, STATUS_EVERY_S * 0.9, STATUS_EVERY_S * 0.2), start=1):
        now += after_s
        writer.step_done(step)
        wait_for(writer)
        assert read_status(paths).step == (1 if step < 3 else 3)
    writer.write("completed", 40)
    assert json.loads(paths.status.read_text()) == {
        "version": 1, "state": "completed", "step": 40, "total_steps": 40, "epoch": 4.0, "attempt": 1,
        "reason": None,
    }  # fmt: skip


def test_training_does_not_wait_for_a_status(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on while the disk hangs, and the late status doesn't replace that of the end."""
    disk, really, begun = threading.Event(), status_module.try_status, []

    def slow(*arguments: Any) -> None:
        begun.append(arguments)
        disk.wait()
        really(*arguments)

    monkeypatch.setattr("hpc_train.training.meters.STATUS_EVERY_S", 0.0)
    monkeypatch.setattr("hpc_train.training.meters.try_status", slow)
    writer = status_writer(paths)
    for step in range(1, 40):
        writer.step_done(step)
    assert not paths.status.exists()
    while not begun:
        time.sleep(0.001)
    threading.Timer(0.05, disk.set).start()
    writer.write("completed", 40)
    wait_for(writer)
    assert read_status(paths).state == "completed" and len(begun) == 1


def test_a_status_says_what_is_compiled_and_keeps_the_step(paths: RunPaths) -> None:
    writer = status_writer(paths)
    writer.write("running", 7)
    writer.compiles(2, earlier_s=30.0)
    seen = read_status(paths)
    assert seen.step == 7 and seen.compiling is not None and seen.compiling["graph"] == 2
    assert int(seen.activity.split()[3]) >= 30
    writer.compiles(0, earlier_s=31.0)
    assert read_status(paths) == replace(seen, compiling=None)


def test_a_cancelled_run_is_not_called_running_again(paths: RunPaths) -> None:
    writer = status_writer(paths)
    writer.write("running", 1)
    paths.cancelled.touch()
    writer.write("running", 2)
    assert json.loads(paths.status.read_text())["step"] == 1
    writer.write("completed", 40)
    assert json.loads(paths.status.read_text())["state"] == "completed"


def test_an_attempt_that_another_took_over_from_ends(paths: RunPaths) -> None:
    """Its node was given up for dead and lives: it must not write over what continues elsewhere."""
    writer = status_writer(paths)
    for number in (1, 2):
        paths.attempt(number).folder.mkdir(parents=True)
        paths.attempt(number).record.write_text("{}")
    with pytest.raises(SupersededError, match="another attempt continues this run; attempt 1 ends"):
        writer.write("running", 1)
    writer._written_at = -math.inf
    writer.step_done(2)
    wait_for(writer)
    with pytest.raises(SupersededError, match="attempt 1 ends"):  # at the next step, not in the thread
        writer.step_done(3)
    assert not paths.status.exists()


@pytest.mark.fault(9)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOSPC])
def test_a_status_that_can_not_be_written_is_a_warning(
    number: int, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    slept: list[float] = []
    monkeypatch.setattr(storage_errors.time, "sleep", slept.append)
    writer = status_writer(paths)
    with monkeypatch.context() as patch:
        patch.setattr("hpc_train.run.run_status.write_json", refuse)
        writer.write("running", 1)
        writer.write("running", 2)
        assert slept == [], "training does not wait for it"
        [warning] = caplog.messages
        assert "status.json can't be written now" in warning and "training continues" in warning
        with pytest.raises(HpcTrainError, match=r"status\.json: the"):
            writer.write("completed", 40)
    writer.write("completed", 40)
    assert read_status(paths).state == "completed"


@pytest.mark.fault(9)
def test_the_last_status_is_tried_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    really, left = status_module.write_json, [2]

    def refuse(*arguments: Any, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        really(*arguments, **options)

    monkeypatch.setattr(storage_errors, "RETRY_AFTER_S", (0.0, 0.0))
    monkeypatch.setattr(status_module, "write_json", refuse)
    status_writer(paths).write("completed", 40)
    assert read_status(paths).state == "completed"
