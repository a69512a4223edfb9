"""wandb's history is ``metrics.jsonl``, whatever was preempted, killed or rolled back."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.loggers import wandb
from hpc_train.loggers.process_logger import WandbLogger, wandb_settings
from hpc_train.loggers.sending import SentRows, locked
from hpc_train.loggers.wandb import WandbMirror, _named, num_accepted, refusal
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from tests.loggers.attempts import Attempt, Make, preempted_killed_and_rolled_back
from tests.loggers.wandb_files import context, offline_rows, plain, row
from tests.loggers.wandb_server import ServedRun, WandbServer
from tests.waiting import HANG_LIMIT_S


def write(run: RunPaths, attempt: int, steps: range, kept: int = 0) -> None:
    """Resume at step ``kept``, then write the rows of ``steps``."""
    file = MetricsFile(run.metrics, kept)
    for step in steps:
        file.append(row("train", step, attempt))
    file.close()


def history_of(run: RunPaths) -> SentRows:
    return SentRows(run.metrics, run.wandb_sent)


def sent(history: SentRows, step: int) -> list[tuple[int, int]]:
    return [(number, row["step"]) for batch in history.batches_up_to(step) for number, row in batch]


@pytest.mark.timeout(HANG_LIMIT_S)
def test_a_pipe_in_the_place_of_the_rows_or_of_the_lock_is_not_waited_for(run: RunPaths) -> None:
    write(run, 1, range(1, 3))
    history = history_of(run)
    assert sent(history, 1) == [(0, 1)]
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    assert sent(history, 2) == [] and history.has_withdrawn()
    run.wandb.mkdir(exist_ok=True)
    os.mkfifo(run.wandb_lock)
    assert locked(run.wandb_lock) is None


def test_rows_are_numbered_as_in_the_file_and_sent_once(run: RunPaths) -> None:
    write(run, 1, range(1, 8))
    history = history_of(run)
    assert sent(history, 3) == [(0, 1), (1, 2), (2, 3)]
    assert sent(history, 3) == []
    assert sent(history, 5) == [(3, 4), (4, 5)]
    history = history_of(run)
    assert history.skip(3), "two rows were recorded and never arrived"
    assert history.suffix == ""
    assert sent(history, 5) == [(3, 4), (4, 5)]
    write(run, 2, range(6, 9), kept=5)  # withdraws rows that were not sent
    history = history_of(run)
    assert history.suffix == "" and history.skip(5)
    assert sent(history, 8) == [(5, 6), (6, 7), (7, 8)]


def test_the_record_is_written_before_a_row_is_sent(run: RunPaths) -> None:
    write(run, 1, range(1, 6))
    next(history_of(run).batches_up_to(5))
    assert history_of(run).skip(5)


def test_a_withdrawal_of_sent_rows_begins_another_run(run: RunPaths) -> None:
    """Even where the file has since grown past what was sent."""
    write(run, 1, range(1, 6))
    sent(history_of(run), 5)
    write(run, 2, range(4, 9), kept=3)
    history = history_of(run)
    assert history.suffix == "-2"
    assert [step for _, step in sent(history, 8)] == list(range(1, 9))
    assert history_of(run).suffix == "-2", "and it stays that one"


@pytest.mark.parametrize("has_record", [True, False])
def test_rows_that_a_server_has_from_elsewhere_are_not_continued(has_record: bool, run: RunPaths) -> None:
    """The record is lost, or somebody else logged to the run."""
    write(run, 1, range(1, 6))
    if has_record:
        sent(history_of(run), 3)
    assert not history_of(run).skip(4)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"segment": 1}', '{"segment": "x", "rows": 1, "end": 1, "last": "{}"}']
)
def test_a_damaged_record_counts_as_none(text: str, run: RunPaths) -> None:
    write(run, 1, range(1, 3))
    run.wandb.mkdir()
    run.wandb_sent.write_text(text)
    assert sent(history_of(run), 2) == [(0, 1), (1, 2)]


def logging_to(run: RunPaths, mode: str) -> Make:
    return lambda number: WandbLogger(context(run.folder, number, mode))


def expected(run: RunPaths) -> list[dict[str, Any]]:
    return [_named(each) for each in iter_rows(run.metrics)]


@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_online_history_equals_the_rows(run: RunPaths, used_server: WandbServer) -> None:
    def has_rows(count: int) -> bool:
        return "wid123" in used_server.runs and len(used_server.runs["wid123"].history) >= count

    preempted_killed_and_rolled_back(run, logging_to(run, "online"), has_rows)
    (served,) = used_server.runs.values()
    assert plain(served.history) == expected(run)
    assert served.received == len(served.history), "no row came twice"
    assert [line["_timestamp"] for line in served.history] == [
        each["time"] for each in iter_rows(run.metrics)
    ]
    assert served.summary["step"] == 16


@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.soak
def test_the_last_offline_attempt_has_all_rows(run: RunPaths) -> None:
    preempted_killed_and_rolled_back(run, logging_to(run, "offline"), lambda _: True)
    files = sorted(run.wandb.glob("offline-run-*/run-wid123.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert 2 <= len(files) <= 4
    for path in files:
        rows = offline_rows(path)
        assert rows == expected(run)[: len(rows)], "any of them may be synced, in any order"
    assert rows == expected(run)


@pytest.mark.slow
def test_rows_sent_and_withdrawn_are_in_another_run(run: RunPaths, used_server: WandbServer) -> None:
    """A checkpoint that is found damaged takes the run behind rows that wandb has."""
    first = Attempt(run, 1, 0, logging_to(run, "online"))
    first.train(*range(1, 9), saved=8)
    first.end("failed")
    second = Attempt(run, 2, 4, logging_to(run, "online"))
    second.train(*range(5, 11), saved=10)
    second.end("completed")
    assert set(used_server.runs) == {"wid123", "wid123-2"}
    assert plain(used_server.runs["wid123-2"].history) == expected(run)
    assert used_server.runs["wid123-2"].name == "run1-2"


_FATAL = "filestream: fatal error: filestream: failed to upload:"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f'{_FATAL} 401 Unauthorized url=http://h/x: {{"a"}}', "401 Unauthorized"),
        (f"{_FATAL} 404 Not Found url=http://h/x", "404 Not Found"),
        (f"{_FATAL} 413 Request Entity Too Large url=http://h", "413 Request Entity Too Large"),
        ("filestream: json decode error: invalid character '<'", "captive portal"),
        ("api: HTTP error 500 Internal", None),
    ],
)
def test_the_reason_is_that_of_wandbs_log(tmp_path: Path, line: str, reason: str | None) -> None:
    (tmp_path / "debug-internal.log").write_text(f'{{"level":"ERROR","msg":"{line}"}}\n')
    assert reason in (refusal(tmp_path) or "") if reason else refusal(tmp_path) is None


def test_the_server_is_asked_for_the_number_of_rows(used_server: WandbServer) -> None:
    asked = SimpleNamespace(project="p", entity=None, id="wid123")
    assert num_accepted(asked) is None
    used_server.runs["wid123"] = ServedRun(history=[{}, {}])
    assert num_accepted(asked) == 2
    used_server.end()
    assert num_accepted(asked) is None


class _FakeRun:
    starting_step = 0
    url = ""

    def __init__(self, folder: Path) -> None:
        self.dir = str(folder / "files")
        self.rows: list[Any] = []

    def define_metric(self, *_: Any, **__: Any) -> None: ...
    def finish(self, exit_code: int) -> None: ...

    def log(self, values: Any, step: int) -> None:
        self.rows.append(values)


def _begun_mirror(run: RunPaths) -> tuple[WandbMirror, list[str]]:
    """Return a mirror of eight rows, which has begun, and its warnings."""
    warnings: list[str] = []
    write(run, 1, range(1, 9))
    mirror = WandbMirror(wandb_settings(context(run.folder, mode="online"), _config(run)), warnings.append)
    mirror.begin()
    return mirror, warnings


@pytest.mark.parametrize(("accepted", "told"), [(0, "has 0 of 2"), (None, "at least 0 of 2"), (8, None)])
def test_a_checkpoint_reports_rows_of_earlier_ones_that_were_refused(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, accepted: int | None, told: str | None
) -> None:
    monkeypatch.setattr(wandb, "_start", lambda *_: _FakeRun(run.folder))
    monkeypatch.setattr(wandb, "num_accepted", lambda _: accepted)
    mirror, warnings = _begun_mirror(run)
    mirror.send(2)
    assert warnings == []
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "a.log").write_text("filestream: fatal error: 403 Forbidden url=x\n")
    mirror.send(4)
    mirror.send(6)
    assert mirror._lock is not None
    mirror._lock.close()
    assert [told in each for each in warnings if told] == ([True] if told else []) == [True] * len(warnings)


def test_an_absent_server_is_retried_at_checkpoints(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = [OSError("away"), OSError("away"), _FakeRun(run.folder)]

    def start(*_: Any) -> Any:
        if isinstance(starts[0], OSError):
            raise starts.pop(0)
        return starts[0]

    monkeypatch.setattr(wandb, "_start", start)
    monkeypatch.setattr(wandb, "num_accepted", lambda _: None)
    mirror, warnings = _begun_mirror(run)
    assert mirror._lock is None, "sync may send meanwhile"
    mirror.show(row("train", 1))
    mirror.send(2)
    mirror.send(4)
    assert [each["step"] for each in starts[0].rows] == [1, 2, 3, 4]
    assert warnings == ["OSError: away"]
    assert mirror._lock is not None
    mirror._lock.close()


def _config(run: RunPaths) -> Any:
    return context(run.folder, mode="online").experiment.logging.wandb
