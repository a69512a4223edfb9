"""wandb's history is ``metrics.jsonl``, whatever was preempted, killed or rolled back."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.loggers.wandb import WandbLogger
from hpc_train.loggers.wandb_history import History
from hpc_train.loggers.wandb_process import _locked, _named
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import iter_rows
from hpc_train.training.meters import MetricsWriter
from hpc_train.training.metrics_file import MetricsFile
from tests.loggers.wandb_files import context, offline_rows, plain, row
from tests.loggers.wandb_server import WandbServer, wandb_server
from tests.waiting import came_true


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def write(run: RunPaths, attempt: int, steps: range, kept: int = 0) -> None:
    """Resume at step ``kept``, then write the rows of ``steps``."""
    file = MetricsFile(run.metrics, kept)
    for step in steps:
        file.append(row("train", step, attempt))
    file.close()


def sent(history: History, step: int) -> list[tuple[int, int]]:
    return [(number, row["step"]) for number, row in history.rows_up_to(step)]


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_the_rows_or_of_the_lock_is_not_waited_for(run: RunPaths) -> None:
    write(run, 1, range(1, 3))
    history = History(run)
    assert sent(history, 1) == [(0, 1)]
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    assert sent(history, 2) == [] and history.has_withdrawn()
    run.wandb.mkdir(exist_ok=True)
    os.mkfifo(run.wandb_lock)
    assert _locked(run) is None


def test_rows_are_numbered_as_in_the_file_and_sent_once(run: RunPaths) -> None:
    write(run, 1, range(1, 8))
    history = History(run)
    assert sent(history, 3) == [(0, 1), (1, 2), (2, 3)]
    assert sent(history, 3) == []
    assert sent(history, 5) == [(3, 4), (4, 5)]


def test_a_resumed_run_continues_behind_what_the_server_has(run: RunPaths) -> None:
    write(run, 1, range(1, 6))
    sent(History(run), 5)
    history = History(run)
    assert history.skip(3), "two rows were recorded and never arrived"
    assert history.suffix == ""
    assert sent(history, 5) == [(3, 4), (4, 5)]


def test_the_record_is_written_before_a_row_is_sent(run: RunPaths) -> None:
    write(run, 1, range(1, 6))
    next(History(run).rows_up_to(5))
    assert History(run).skip(5)


def test_rows_that_were_not_sent_may_be_withdrawn(run: RunPaths) -> None:
    write(run, 1, range(1, 8))
    sent(History(run), 5)
    write(run, 2, range(6, 9), kept=5)
    history = History(run)
    assert history.suffix == "" and history.skip(5)
    assert sent(history, 8) == [(5, 6), (6, 7), (7, 8)]


def test_a_withdrawal_of_sent_rows_begins_another_run(run: RunPaths) -> None:
    """Even where the file has since grown past what was sent."""
    write(run, 1, range(1, 6))
    sent(History(run), 5)
    write(run, 2, range(4, 9), kept=3)
    history = History(run)
    assert history.suffix == "-2"
    assert [step for _, step in sent(history, 8)] == list(range(1, 9))
    assert History(run).suffix == "-2", "and it stays that one"


@pytest.mark.parametrize("has_record", [True, False])
def test_rows_that_a_server_has_from_elsewhere_are_not_continued(has_record: bool, run: RunPaths) -> None:
    """0.1 sent rows without a record, and some of them twice."""
    write(run, 1, range(1, 6))
    if has_record:
        sent(History(run), 3)
    assert not History(run).skip(4)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"segment": 1}', '{"segment": "x", "rows": 1, "end": 1, "last": "{}"}']
)
def test_a_damaged_record_counts_as_none(text: str, run: RunPaths) -> None:
    write(run, 1, range(1, 3))
    run.wandb.mkdir()
    run.wandb_sent.write_text(text)
    assert sent(History(run), 2) == [(0, 1), (1, 2)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with wandb_server() as served:
        for name, value in served.environment().items():
            monkeypatch.setenv(name, value)
        yield served


class Attempt:
    """Rank 0's recorder of one attempt, with wandb as its logger."""

    def __init__(self, run: RunPaths, number: int, resumed_step: int, mode: str) -> None:
        self._number = number
        self._salt = number * 10
        self._logger = WandbLogger(context(run.folder, number, mode))
        self._recorder = MetricsWriter(MetricsFile(run.metrics, resumed_step), [self._logger], io.StringIO())
        self._recorder.begin(resumed_step)

    def train(self, *steps: int, saved: int | None = None) -> None:
        for step in steps:
            self._write("train", step)
            if step % 2 == 0:
                self._write("val", step)
        if saved is not None:
            self._recorder.committed(saved)

    def _write(self, split: str, step: int) -> None:
        self._recorder.write(row(split, step, self._number) | {"loss": step + self._salt})

    def roll_back(self, step: int) -> None:
        self._recorder.go_back(step)
        self._salt += 1

    def end(self, state: str) -> None:
        self._recorder.state = state
        self._recorder.close()
        assert self._logger._process is not None and self._logger._process.returncode == 0

    def kill(self, kills_wandb: bool) -> None:
        assert came_true(lambda: self._logger._process is not None, limit_s=60)
        process = self._logger._process
        assert process is not None and process.stdin is not None
        if kills_wandb:
            os.killpg(process.pid, signal.SIGKILL)
        else:  # its input ends, as where the rank dies
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), process.stdin.fileno())
        process.wait()


def expected(run: RunPaths) -> list[dict[str, Any]]:
    return [_named(each) for each in iter_rows(run.metrics)]


def preempted_killed_and_rolled_back(run: RunPaths, mode: str, has_rows: Callable[[int], bool]) -> None:
    first = Attempt(run, 1, 0, mode)
    first.train(*range(1, 9), saved=5)
    first.kill(kills_wandb=False)
    second = Attempt(run, 2, 5, mode)
    second.train(*range(6, 13), saved=10)
    assert came_true(lambda: has_rows(8), limit_s=60)
    second.kill(kills_wandb=True)
    third = Attempt(run, 3, 10, mode)
    third.train(11, 12, 13)
    third.roll_back(10)
    third.train(11, 12, saved=12)
    third.end("failed")
    fourth = Attempt(run, 4, 12, mode)
    fourth.train(13, 14, 15)
    fourth.roll_back(12)
    fourth.train(13, 14, 15, 16, saved=16)
    fourth.end("completed")


@pytest.mark.fault(30)
@pytest.mark.slow
def test_online_history_equals_the_rows(run: RunPaths, server: WandbServer) -> None:
    def has_rows(count: int) -> bool:
        return "wid123" in server.runs and len(server.runs["wid123"].history) >= count

    preempted_killed_and_rolled_back(run, "online", has_rows)
    (served,) = server.runs.values()
    assert plain(served.history) == expected(run)
    assert served.received == len(served.history), "no row came twice"
    assert [line["_timestamp"] for line in served.history] == [
        each["time"] for each in iter_rows(run.metrics)
    ]
    assert served.summary["step"] == 16


@pytest.mark.fault(30)
@pytest.mark.slow
def test_the_last_offline_attempt_has_all_rows(run: RunPaths) -> None:
    preempted_killed_and_rolled_back(run, "offline", lambda _: True)
    files = sorted(run.wandb.glob("offline-run-*/run-wid123.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert 2 <= len(files) <= 4
    for path in files:
        rows = offline_rows(path)
        assert rows == expected(run)[: len(rows)], "any of them may be synced, in any order"
    assert rows == expected(run)


@pytest.mark.slow
def test_rows_that_were_sent_and_withdrawn_are_in_another_run(run: RunPaths, server: WandbServer) -> None:
    """A checkpoint that is found damaged takes the run behind rows that wandb has."""
    first = Attempt(run, 1, 0, "online")
    first.train(*range(1, 9), saved=8)
    first.end("failed")
    second = Attempt(run, 2, 4, "online")
    second.train(*range(5, 11), saved=10)
    second.end("completed")
    assert set(server.runs) == {"wid123", "wid123-2"}
    assert plain(server.runs["wid123-2"].history) == expected(run)
    assert server.runs["wid123-2"].name == "run1-2"
