"""The MLflow logger: a separate process, ``loggers.mlflow_process``, sends the rows.

Importing MLflow takes seconds, and a server that does not answer blocks its client; so this module never
imports it.
"""

from __future__ import annotations

import os
from typing import Any

from hpc_train.config.schema import MlflowConfig
from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.loggers.process_logger import ProcessLogger, print_environment
from hpc_train.loggers.tracker_environment import passed_on

#: Defaults, which the environment overrides. The client does not retry a request, since it can't know whether
#: the first one arrived; failed rows are sent at the next commit.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # Another host, such as a captive portal, would accept the rows, and they would be recorded as sent.
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Folders need no server and no database, and MLflow refuses them otherwise.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class MlflowLogger(ProcessLogger):
    """One MLflow run over all attempts: the experiment as its parameters, final rows as its metrics."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.mlflow
        assert settings is not None, "the mlflow logger needs logging.mlflow"
        message = start_message(context, settings)
        print_environment("mlflow")
        super().__init__("mlflow", "hpc_train.loggers.mlflow_process", message, environment())

    def log(self, row: Row) -> None:
        """Do nothing: MLflow can't withdraw a row that is not final."""


def environment() -> dict[str, str]:
    """Return the environment of a process that talks to MLflow."""
    return DEFAULTS | passed_on("mlflow", os.environ)


def start_message(context: LoggerContext, settings: MlflowConfig) -> dict[str, Any]:
    """Return the settings for ``loggers.mlflow_process``; credentials are only in its environment."""
    return {
        "run_id": context.run_id,
        "folder": str(context.paths.folder.absolute()),
        "tracking_uri": settings.tracking_uri,
        "experiment": settings.experiment or context.experiment.name,
        "id": context.wandb_id,
        "name": context.run_id,
        "params": context.experiment.model_dump(mode="json"),
    }
