"""Rows that wandb's server does not take are reported, and sent once it takes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.loggers import wandb
from hpc_train.loggers.process_logger import wandb_settings
from hpc_train.loggers.wandb import WandbMirror, num_accepted, refusal
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile
from tests.loggers.wandb_files import context, row
from tests.loggers.wandb_server import ServedRun, WandbServer


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            'filestream: fatal error: filestream: failed to upload: 401 Unauthorized url=http://h/x: {"a"}',
            "401 Unauthorized",
        ),
        (
            "filestream: fatal error: filestream: failed to upload: 404 Not Found url=http://h/x",
            "404 Not Found",
        ),
        (
            "filestream: fatal error: filestream: failed to upload: 413 Request Entity Too Large url=http://h",
            "413 Request Entity Too Large",
        ),
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


@pytest.mark.parametrize(("accepted", "told"), [(0, "has 0 of 2"), (None, "at least 0 of 2"), (8, None)])
def test_a_checkpoint_reports_rows_of_earlier_ones_that_were_refused(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, accepted: int | None, told: str | None
) -> None:
    monkeypatch.setattr(wandb, "_start", lambda *_: _FakeRun(run.folder))
    monkeypatch.setattr(wandb, "num_accepted", lambda _: accepted)
    warnings: list[str] = []
    file = MetricsFile(run.metrics, 0)
    for step in range(1, 9):
        file.append(row("train", step))
    file.close()
    mirror = WandbMirror(wandb_settings(context(run.folder, mode="online"), _config(run)), warnings.append)
    mirror.begin()
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
    warnings: list[str] = []
    file = MetricsFile(run.metrics, 0)
    for step in range(1, 9):
        file.append(row("train", step))
    file.close()
    mirror = WandbMirror(wandb_settings(context(run.folder, mode="online"), _config(run)), warnings.append)
    mirror.begin()
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
