from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import Experiment
from hpc_train.loggers import wandb as wandb_module
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.wandb import WandbLogger
from hpc_train.loggers.wandb_key import has_key
from hpc_train.loggers.wandb_process import _named
from hpc_train.paths import RunPaths


def context(folder: Path, attempt: int = 1, mode: str = "auto") -> LoggerContext:
    experiment = Experiment.model_validate(
        {
            "name": "cifar",
            "task": "classification",
            "model": {"name": "timm/resnet18"},
            "data": {"name": "digits"},
            "optimization": {
                "epochs": 1,
                "global_batch_size": 4,
                "micro_batch_size": 4,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "logging": {"wandb": {"project": "p", "mode": mode, "tags": ["a"]}},
        }
    )
    return LoggerContext(experiment, RunPaths(folder), "run1", attempt, "wid123", {})


def row(split: str, step: int, attempt: int = 1) -> dict[str, Any]:
    return {"time": 1.0, "attempt": attempt, "split": split, "step": step, "epoch": 0, "loss": step / 2}


@pytest.fixture(autouse=True)
def _no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A loopback port that refuses: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def records(path: Path) -> Iterator[Any]:
    """Read wandb's file: LevelDB's log format after a header of 7 bytes, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, position, parts = path.read_bytes(), 7, b""
    while position < len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            record = proto.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read_run(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    found = list(records(path))
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return runs[0], rows


@pytest.mark.fault(30)
@pytest.mark.slow
def test_offline_attempts_carry_one_id_and_all_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hooks = sys.exit, sys.excepthook
    for attempt in (1, 2):
        logger = WandbLogger(context(tmp_path, attempt))
        logger.log(row("train", attempt, attempt))
        logger.log(row("val", attempt, attempt))
        logger.close("failed" if attempt == 1 else "completed")
        assert not logger._thread.is_alive()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-wid123.wandb"))
    assert len(files) == 2
    for attempt, path in enumerate(files, start=1):
        run, rows = read_run(path)
        assert (run.run_id, run.display_name, run.run_group) == ("wid123", "run1", "cifar")
        assert (run.project, list(run.tags), run.host) == ("p", ["a"], "")
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["optimization"]["optimizer"]["lr"] == 0.1
        assert [r.get("train/loss") for r in rows] == [attempt / 2, None]
        assert [r.get("val/loss") for r in rows] == [None, attempt / 2]
        assert [r["step"] for r in rows] == [attempt, attempt]
    assert (sys.exit, sys.excepthook) == hooks
    assert "wandb" not in sys.modules or sys.modules["wandb"].run is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault(32, 45)
@pytest.mark.slow
def test_a_dead_server_blocks_neither_rows_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed_port: int
) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(wandb_module, "_CLOSE_LIMIT_S", 3.0)
    logger = WandbLogger(context(tmp_path, mode="online"))
    _wait_until(lambda: logger._process is not None)
    for step in range(5000):
        logger.log(row("train", step))
    assert logger._process is not None and logger._process.poll() is None
    assert not logger._waiting.empty(), "rows were waited for"  # they are more than the pipe takes
    logger.close("completed")
    assert logger._process.returncode == -signal.SIGKILL, "wandb was waited for"
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("wandb: ") and "metrics.jsonl" in told
    assert all(key.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_missing_key_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed_port: int
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    logger = WandbLogger(context(tmp_path, mode="online"))
    _wait_until(lambda: logger._process is not None)
    assert logger._process is not None and logger._process.wait(30) == 0
    logger.log(row("train", 1))
    logger.close("completed")
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("wandb: ")


def test_a_killed_process_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_module, "_start_process", _start_deaf)
    logger = WandbLogger(context(tmp_path))
    _wait_until(lambda: logger._process is not None)
    assert logger._process is not None
    os.kill(logger._process.pid, signal.SIGKILL)
    logger._process.wait()
    for step in range(3):
        logger.log(row("train", step))
    logger.close("completed")
    assert capfd.readouterr().err == wandb_module.warning("its process ended") + "\n"


@pytest.mark.fault(32)
def test_more_rows_than_the_queue_holds_are_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_module, "_MOST_WAITING", 50)
    monkeypatch.setattr(wandb_module, "_CLOSE_LIMIT_S", 0.2)
    monkeypatch.setattr(wandb_module, "_start_process", _start_deaf)
    logger = WandbLogger(context(tmp_path))
    for step in range(500):
        logger.log(row("train", step) | {"note": "more than the pipe takes" * 500})
    logger.close("completed")
    assert not logger._thread.is_alive()
    assert capfd.readouterr().err == wandb_module.warning("it is 50 rows behind") + "\n"


def test_a_process_that_can_not_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    logger = WandbLogger(context(tmp_path))
    logger.log(row("train", 1))
    logger.close("failed")
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "can't be started" in told


def _start_deaf() -> subprocess.Popen[str]:
    """Start a process that reads nothing and never ends."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def _wait_until(is_so: Any, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        os.sched_yield()


def test_rows_keep_their_step_as_a_value() -> None:
    assert _named(row("val", 5)) == {"step": 5, "epoch": 0, "attempt": 1, "val/loss": 2.5}


def test_a_key_is_found_in_the_environment_or_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_key()
    (tmp_path / "netrc").write_text("machine elsewhere.org login user password secret\n")
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.elsewhere.edu")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert has_key()
