"""An invalid variable of a tracker is named and ignored; the rows are sent nevertheless."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.loggers import mlflow, process_logger, wandb
from hpc_train.loggers.process_logger import WandbLogger
from hpc_train.paths import RunPaths
from tests.loggers.attempts import Attempt
from tests.loggers.wandb_files import context
from tests.loggers.wandb_server import WandbServer


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test deletes of the environment from the next test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(
    ("name", "value", "is_valid"),
    [
        ("WANDB_INIT_TIMEOUT", "90s", False),
        ("WANDB_INIT_TIMEOUT", "90", True),
        ("WANDB_HTTP_TIMEOUT", "long", False),
        ("WANDB_X_FILE_STREAM_RETRY_MAX", "many", False),
        ("WANDB_INSECURE_DISABLE_SSL", "perhaps", False),
    ],
)
def test_bad_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_valid: bool) -> None:
    monkeypatch.setitem(os.environ, name, value)
    told: list[str] = []
    wandb._drop_invalid_settings(told.append)
    assert (name in os.environ) == is_valid
    assert [each.startswith(f"{name}={value} is invalid (") for each in told] == [True] * (not is_valid)
    assert wandb._init_timeout_s() == (90.0 if is_valid else wandb._INIT_TIMEOUT_S)


def test_rows_do_not_go_elsewhere_for_an_invalid_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WANDB_BASE_URL", "wandb.example.org")
    with pytest.raises(ValueError, match=r"WANDB_BASE_URL=wandb.example.org is invalid.*nothing is sent"):
        wandb._drop_invalid_settings(lambda what: None)


def test_an_invalid_variable_of_mlflow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT", "10s")
    monkeypatch.setitem(os.environ, "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "x")
    told: list[str] = []
    mlflow._drop_invalid_settings(told.append)
    assert told == [
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR=x is invalid and is ignored",
        "MLFLOW_HTTP_REQUEST_TIMEOUT=10s is invalid and is ignored",
    ]
    timeout = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    assert os.environ[timeout] == process_logger.MLFLOW_DEFAULTS[timeout]
    assert "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR" not in os.environ


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_the_rest_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], server: WandbServer
) -> None:
    settings = {"WANDB_INIT_TIMEOUT": "90s", "WANDB_MODE": "onlin"} | server.environment()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    run = RunPaths(tmp_path)
    attempt = Attempt(run, 1, 0, lambda number: WandbLogger(context(run.folder, number, "auto")))
    attempt.train(1, 2, 3, saved=3)
    attempt.end("completed")
    assert len(server.runs["wid123"].history) == 4
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and "WANDB_MODE=onlin is not a mode" in told[0]
    assert "WANDB_INIT_TIMEOUT=90s is invalid" in told[1]
