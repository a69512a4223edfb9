"""A logger that hangs costs training a limited time, once."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hpc_train import registry
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.schema import LoggingConfig
from hpc_train.loggers import metrics_writer as logger_threads
from hpc_train.loggers.base import Logger
from hpc_train.loggers.metrics_writer import (
    LIMIT_S,
    LoggerThread,
    MetricsWriter,
    call_all,
    make_logger,
    start_logger,
)
from hpc_train.run.metric_rows import MetricsFile
from tests.loggers.wandb_files import context, row
from tests.waiting import HANG_LIMIT_S

_released = threading.Event()


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _released.clear()
    monkeypatch.setattr(logger_threads, "LIMIT_S", 0.5)
    yield
    _released.set()


class Noting:
    def __init__(self, context: Any = None) -> None:
        self.threads = [threading.get_ident()]
        self.steps: list[int] = []
        self.state: str | None = None

    def log(self, row: dict[str, Any]) -> None:
        self.threads.append(threading.get_ident())
        self.steps.append(row["step"])

    def close(self, state: str) -> None:
        self.threads.append(threading.get_ident())
        self.state = state


class HangsInLog(Noting):
    def log(self, row: dict[str, Any]) -> None:
        super().log(row)
        _released.wait(HANG_LIMIT_S)


class HangsInClose(Noting):
    def close(self, state: str) -> None:
        super().close(state)
        _released.wait(HANG_LIMIT_S)


class HangsInConstructor(Noting):
    def __init__(self, context: Any) -> None:
        _released.wait(HANG_LIMIT_S)


def test_a_logger_that_hangs_is_abandoned_and_the_others_get_every_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, last, noting = HangsInLog(), HangsInClose(), Noting()
    writer = MetricsWriter(MetricsFile(tmp_path / "m", 0), [hanging, last, noting], io.StringIO())
    for step in (1, 2, 3):
        writer.write(row("train", step))
    writer.state = "completed"
    writer.close()
    assert hanging.steps == [1] and hanging.state is None
    assert noting.steps == last.steps == [1, 2, 3] and noting.state == last.state == "completed"
    for name in ("HangsInLog", "HangsInClose"):
        assert caplog.text.count(f"logger {name} is abandoned: it did not return within 0.5 s") == 1


def test_loggers_that_hang_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def noted(calls: list[Future[Any]], limit_s: float) -> Any:
        limits.append(limit_s)
        return futures.wait(calls, limit_s)

    monkeypatch.setattr(logger_threads, "wait", noted)
    threads = [LoggerThread.around(HangsInClose()) for _ in range(3)]
    failed = call_all(threads, lambda logger: logger.close("completed"), is_last=True)
    assert [thread for thread, _ in failed] == threads
    assert limits[0] > 0 and limits[1:] == [0.0, 0.0]


def test_a_constructor_that_hangs_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger_threads, "START_LIMIT_S", 0.2)
    assert start_logger(f"{__name__}:HangsInConstructor", context(tmp_path)) is None
    assert f"{__name__}:HangsInConstructor is abandoned: it was not constructed within 0.2 s" in caplog.text


def test_a_logger_is_constructed_and_called_in_one_thread(tmp_path: Path) -> None:
    made: list[Logger] = []

    def make() -> Logger:
        made.append(Noting())
        return made[0]

    thread = LoggerThread("noting")
    assert thread.construct(make)
    writer = MetricsWriter(MetricsFile(tmp_path / "m", 0), [thread], io.StringIO())
    writer.write(row("train", 1))
    writer.close()
    (logger,) = made
    assert isinstance(logger, Noting) and len(logger.threads) == 3
    assert len({*logger.threads, threading.get_ident()}) == 2


class Patient(Noting):
    def __init__(self, close_limit_s: float) -> None:
        super().__init__()
        self.close_limit_s = close_limit_s


@pytest.mark.parametrize(("own", "limit"), [(30.0, 30.0), (1e9, 90.0), (1.0, LIMIT_S)])
def test_a_logger_may_limit_its_end_itself(monkeypatch: pytest.MonkeyPatch, own: float, limit: float) -> None:
    monkeypatch.setattr(logger_threads, "LIMIT_S", LIMIT_S)
    assert LoggerThread.around(Patient(own)).close_limit_s == limit


CLASS = "class Broken:\n    def __init__(self, context): "


@pytest.mark.parametrize(
    "text",
    [
        "import a_package_that_is_not_there\n",
        "raise RuntimeError('broken')\n",
        "import sys\nsys.exit(0)\n",
        f"{CLASS}raise RuntimeError('broken')\n",
        f"{CLASS}raise SystemExit(0)\n",
        "",
    ],
)
def test_a_logger_that_can_not_start_is_a_warning(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_logger.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_logger", raising=False)
    assert make_logger("own_logger:Broken", context(tmp_path)) is None
    [message] = caplog.messages
    assert "own_logger:Broken can't be started" in message and "training continues" in message
    assert make_logger(f"{__name__}:Noting", context(tmp_path)) is not None


class TableConfig(Section):
    file: str = "rows.csv"


class WithTable(LoggingConfig):
    table: TableConfig | None = None


def test_a_section_of_logging_turns_on_the_logger_of_its_name() -> None:
    config = WithTable.model_validate({"table": {}, "loggers": {"own": {"color": "red"}}})
    assert config.arguments_by_logger() == {"table": {"file": "rows.csv"}, "own": {"color": "red"}}
    assert WithTable().arguments_by_logger() == {}


def test_every_section_of_logging_has_a_logger() -> None:
    """Otherwise the section of the file would do nothing except cause a warning in rank 0's log."""
    names = LoggingConfig.model_fields.keys() - {"every_steps", "loggers"}
    assert names <= registry.parts("loggers").keys()
