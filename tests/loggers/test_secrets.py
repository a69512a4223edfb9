"""No secret of the environment reaches a file or an output, whatever the tracker was told to print."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest

from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.metrics_writer import MetricsWriter, make_logger
from hpc_train.loggers.process_logger import MlflowLogger, WandbLogger
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.metric_rows import MetricsFile
from tests.cli.commands import hpc_train
from tests.loggers.attempts import Attempt
from tests.loggers.test_mlflow import context_of
from tests.loggers.test_sync import saved, write_rows
from tests.loggers.wandb_files import context, row
from tests.loggers.wandb_server import WandbServer
from tests.run.runs import small_run

#: Part of every secret here.
MARKER = "5ecretmark"
_KEY = MARKER * 4
_DEBUGGING = {
    "WANDB_DEBUG": "true",
    "WANDB_CORE_DEBUG": "true",
    "WANDB__LOG_LEVEL": "-4",
    "MLFLOW_LOGGING_LEVEL": "DEBUG",
    "MLFLOW_SQLALCHEMYSTORE_ECHO": "true",
}


@pytest.fixture(autouse=True)
def _secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _DEBUGGING.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    monkeypatch.setenv("HF_TOKEN", f"hf_{MARKER}")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"{MARKER}@1")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{MARKER}@127.0.0.1:9")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "netrc").write_text(f"machine h login me password {MARKER}-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))


def leaks(folder: Path, outputs: Any) -> list[str]:
    """Return where the marker is: in files of the folder, or in what was printed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = [str(path) for path in files if MARKER.encode() in path.read_bytes()]
    return found + [text for text in outputs if MARKER in text]


def train(run: RunPaths, make: Any) -> Attempt:
    attempt = Attempt(run, 1, 0, make)
    attempt.train(1, 2, 3, saved=3)
    attempt._metrics_writer.state = "completed"
    attempt._metrics_writer.close()
    return attempt


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
@pytest.mark.parametrize("case", ["taken", "user in the address", "offline"])
def test_wandb_writes_no_secret(
    run: RunPaths,
    server: WandbServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    case: str,
) -> None:
    url = server.url.replace("//", f"//me:{MARKER}@") if case == "user in the address" else server.url
    monkeypatch.setenv("WANDB_BASE_URL", url)
    mode = "offline" if case == "offline" else "online"
    train(run, lambda number: WandbLogger(context(run.folder, number, mode)))
    assert len(server.runs) == (0 if case == "offline" else 1)
    assert list(run.wandb.glob("*run-*/logs/*.log"))
    assert leaks(run.folder, capfd.readouterr()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_mlflow_writes_no_secret_of_an_address_that_is_no_url(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed_port: int
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:p@{MARKER}/{MARKER}@127.0.0.1:{closed_port}")
    train(run, lambda number: MlflowLogger(context_of(run, None, number)))
    told = capfd.readouterr()
    assert told.err.startswith("mlflow: ")
    assert leaks(run.folder, told) == []


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_run_folder_loggers_hide_secrets(run: RunPaths, capfd: pytest.CaptureFixture[str], name: str) -> None:
    def make(number: int) -> Any:
        return make_logger(name, context(run.folder, number))

    train(run, make)
    assert leaks(run.folder, capfd.readouterr()) == []


class Refused:
    """A plug-in whose errors name what it has sent."""

    def __init__(self, context: LoggerContext) -> None:
        if context.args:
            raise OSError(f"http://me:{MARKER}@host refused {_KEY}")

    def log(self, row: dict[str, Any]) -> None:
        raise OSError(f"http://me:{MARKER}@host refused {_KEY}")

    def close(self, state: str) -> None:
        pass


def test_a_plugins_error_is_shown_without_secrets(run: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    name = f"{__name__}:Refused"
    assert make_logger(name, context(run.folder, args={"fails": True})) is None
    logger = make_logger(name, context(run.folder))
    assert logger is not None
    writer = MetricsWriter(MetricsFile(run.metrics, 0), [logger], io.StringIO())
    writer.write(row("train", 1))
    writer.close()
    assert caplog.text.count("http://host refused [secret]") == 2 and MARKER not in caplog.text


@pytest.mark.slow
def test_sync_prints_and_writes_no_secret(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:p@{MARKER}@127.0.0.1:{closed_port}")
    run = small_run(runs_root())
    write_rows(run, 1)
    saved(run, 1, 0)
    for options in ((), ("--json",)):
        done = hpc_train("sync", "abc", "--to", "mlflow", *options)
        assert done.code == 75 and "127.0.0.1" in done.out + done.err
        assert leaks(run.folder, (done.out, done.err)) == []
