from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.loggers import process_logger
from hpc_train.paths import RunPaths
from tests.loggers.tracking_server import serving
from tests.loggers.wandb_server import WandbServer
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """The folder of run ``run1``."""
    (tmp_path / "cifar" / "run1").mkdir(parents=True)
    return RunPaths(tmp_path / "cifar" / "run1")


@pytest.fixture(autouse=True)
def _no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the event files of a test sorted as they were begun, within a second too: 10 is before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10))


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only a hang end wandb's process: on a busy machine it needs more than the usual limit."""
    monkeypatch.setattr(process_logger, "_START_LIMIT_S", HANG_LIMIT_S)
    monkeypatch.setattr(process_logger, "_CLOSE_LIMIT_S", HANG_LIMIT_S)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    """A fake of wandb's server."""
    with serving(WandbServer()) as served:
        yield served


@pytest.fixture
def used_server(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> WandbServer:
    """The same, and the environment names it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A loopback port that refuses connections: bound, so that it stays reserved, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
