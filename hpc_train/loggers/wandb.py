"""The wandb logger: a separate process sends the rows.

wandb replaces ``sys.exit`` and ``sys.excepthook``, waits for its server at exit and blocks for minutes
without one. So this module never imports it; ``loggers.wandb_process`` does.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hpc_train.config.schema import WandbConfig
from hpc_train.errors import printable
from hpc_train.loggers.base import LoggerContext, LoggerOffError, Row
from hpc_train.loggers.process_logger import ProcessLogger, notice, print_environment
from hpc_train.loggers.tracker_environment import passed_on
from hpc_train.loggers.wandb_key import base_url, effective_mode, invalid_mode


class WandbLogger(ProcessLogger):
    """Shows the newest row as the run's newest values; the curves show it once it is final."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.wandb
        assert settings is not None, "the wandb logger needs logging.wandb"
        if invalid := invalid_mode():
            problem = f"WANDB_MODE={printable(invalid)} is not a mode and is ignored"
            print(notice("wandb", problem), file=sys.stderr, flush=True)
        message = start_message(context, settings)
        if message["mode"] == "disabled":
            raise LoggerOffError("turned off by WANDB_MODE or WANDB_DISABLED; `mode: online` overrides them")
        print_environment("wandb")
        super().__init__(
            "wandb",
            "hpc_train.loggers.wandb_process",
            message,
            environment(),
            waits_for_start=message["mode"] == "offline",
        )

    def log(self, row: Row) -> None:
        """Show the row's values."""
        self._tell(newest=row)


def environment() -> dict[str, str]:
    """Return the environment of a process that talks to wandb.

    It contains the server's address, since wandb ignores its settings file if a line is invalid, but not the
    mode, which is in the start message.
    """
    address = {"WANDB_BASE_URL": url} if (url := base_url()) else {}
    passed = passed_on("wandb", os.environ)
    return {name: passed[name] for name in passed.keys() - {"WANDB_MODE", "WANDB_DISABLED"}} | address


def start_message(context: LoggerContext, settings: WandbConfig) -> dict[str, Any]:
    """Return the settings for ``loggers.wandb_process``; the API key is only in its environment."""
    return {
        "mode": effective_mode(settings.mode),
        "run_id": context.run_id,
        "folder": str(context.paths.folder.absolute()),
        "init": {
            "project": settings.project,
            "entity": settings.entity,
            "tags": settings.tags,
            "id": context.wandb_id,
            "name": context.run_id,
            "group": context.experiment.name,
            "config": context.experiment.model_dump(mode="json"),
        },
    }
