from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_train.loggers import process_logger
from hpc_train.loggers.process_logger import WandbLogger
from hpc_train.loggers.tracker_environment import has_key
from hpc_train.loggers.wandb import _named
from tests.loggers.wandb_files import context, read_run, row
from tests.waiting import HANG_LIMIT_S


@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_an_offline_attempt_says_what_the_run_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hooks = sys.exit, sys.excepthook
    for attempt in (1, 2):
        logger = WandbLogger(context(tmp_path, attempt))
        logger.close("failed" if attempt == 1 else "completed")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-wid123.wandb"))
    assert len(files) == 2
    for path in files:
        run, rows = read_run(path)
        assert (run.run_id, run.display_name, run.run_group) == ("wid123", "run1", "cifar")
        assert (run.project, list(run.tags), run.host) == ("p", ["a"], "")
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["optimization"]["optimizer"]["lr"] == 0.1
        assert rows == []
    assert (sys.exit, sys.excepthook) == hooks
    assert "wandb" not in sys.modules or sys.modules["wandb"].run is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_a_missing_key_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed_port: int
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    logger = WandbLogger(context(tmp_path, mode="online"))
    logger.log(row("train", 1))
    logger.close("completed")
    assert logger._process is not None and logger._process.returncode == 0
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("wandb: ")


def test_a_killed_process_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_logger, "start_process", _start_deaf)
    logger = WandbLogger(context(tmp_path))
    assert logger._process is not None
    os.kill(logger._process.pid, signal.SIGKILL)
    logger._process.wait()
    for step in range(3):
        logger.log(row("train", step))
    logger.close("completed")
    assert capfd.readouterr().err == process_logger.warning("wandb", "its process ended", "run1") + "\n"


@pytest.mark.fault(32)
def test_rows_neither_wait_nor_pile_up_for_a_process_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_logger, "_CLOSE_LIMIT_S", 0.2)
    monkeypatch.setattr(process_logger, "start_process", _start_deaf)
    logger = WandbLogger(context(tmp_path, mode="online"))
    long = {"note": "more than the pipe takes" * 5000}
    logger.log(row("train", 0) | long)
    assert logger._unwritten
    for step in range(500):
        logger.log(row("train", step) | long)
        logger.rows_committed(step)
    assert logger._news.keys() == {"newest", "committed"}, "only the newest state waits"
    assert logger._news["committed"] == 499
    logger.close("completed")
    late = process_logger.warning("wandb", "it did not finish within 0.2 s", "run1")
    assert capfd.readouterr().err == late + "\n"


@pytest.mark.parametrize("starts", [True, False])
def test_an_offline_process_that_starts_late_is_waited_for_once(
    starts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It starts after ``close`` has begun, or never."""

    def start(environment: object) -> subprocess.Popen[bytes]:
        end = "import os; os.write(1, b'started')" if starts else "signal.pause()"
        return _started(f"import signal, sys; sys.stdin.readline(); sys.stdin.readline(); {end}")

    monkeypatch.setattr(process_logger, "_START_LIMIT_S", HANG_LIMIT_S if starts else 0.2)
    monkeypatch.setattr(process_logger, "_CLOSE_LIMIT_S", HANG_LIMIT_S)
    monkeypatch.setattr(process_logger, "start_process", start)
    logger = WandbLogger(context(tmp_path, mode="offline"))
    logger.close("completed")
    assert logger._process is not None
    assert logger._process.returncode == (0 if starts else -signal.SIGALRM)
    late = "its process did not start within 0.2 s"
    assert capfd.readouterr().err == ("" if starts else process_logger.warning("wandb", late, "run1") + "\n")


def test_a_process_that_can_not_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    logger = WandbLogger(context(tmp_path))
    logger.log(row("train", 1))
    logger.close("failed")
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "can't be started" in told


def _started(script: str) -> subprocess.Popen[bytes]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    return subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes)


def _start_deaf(*_: object) -> subprocess.Popen[bytes]:
    """Start a process that reads nothing and never ends."""
    return _started("import signal; signal.pause()")


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


_KEY = "0123456789abcdef" * 2 + "01234567"
_OWN = "https://wandb.example.edu:8443"


def _login(home: Path, *options: str) -> None:
    """Save a key as a user does, with the command of the installed wandb; no server is asked."""
    script = "import sys; from wandb.cli.cli import cli; cli(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", script, "login", "--no-verify", *options, _KEY],
        cwd=home,
        env=os.environ | {"HOME": str(home)},
        check=True,
        capture_output=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--host", _OWN), ("--host", "https://api.wandb.ai")])
def test_wandb_login_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Whatever the installed wandb's default server is, and where it writes the key and the server."""
    for name in ("NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_key()
    _login(tmp_path, *options)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.elsewhere.edu")
    assert not has_key()
    if options:
        monkeypatch.setenv("WANDB_BASE_URL", options[1])
        assert has_key()


@pytest.mark.parametrize(
    ("url", "machine", "is_found"),
    [
        (None, "api.wandb.ai", True),
        (None, "api.forge.coreweave.com", True),
        (None, "wandb.example.edu", False),
        ("https://api.forge.coreweave.com/", "api.wandb.ai", True),
        ("https://forge.coreweave.com/api/wandb", "api.forge.coreweave.com", True),
        ("https://api.wandb.ai", "api.forge.coreweave.com", False),
        (_OWN, "wandb.example.edu:8443", True),
        (_OWN, "wandb.example.edu", True),
        (_OWN, "wandb.example.edu:9000", False),
        (_OWN, "api.wandb.ai", False),
    ],
)
@pytest.mark.parametrize("place", ["environment", "settings"])
def test_a_key_counts_for_its_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None, machine: str, is_found: bool, place: str
) -> None:
    (tmp_path / "netrc").write_text(f"machine {machine} login user password secret\n")
    (tmp_path / "netrc").chmod(0o644)  # wandb reads it, though netrc refuses such a default file
    if url is not None and place == "environment":
        monkeypatch.setenv("WANDB_BASE_URL", url)
    elif url is not None:
        _write_settings(tmp_path, f"base_url = {url}")
    assert has_key() == is_found
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.elsewhere.edu")
    assert not has_key(), "the environment overrides the settings"


def _write_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config" / "settings").write_text(f"[default]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [("api_key = secret", True), ("api_key =", False), ("[", False), ("x = %(y)s", False)],
)
def test_a_key_in_wandbs_settings_is_found(tmp_path: Path, text: str, is_found: bool) -> None:
    _write_settings(tmp_path, text)
    assert has_key() == is_found
