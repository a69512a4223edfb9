"""The wandb logger: a separate process sends the rows.

wandb replaces ``sys.exit`` and ``sys.excepthook``, waits for its server at exit and blocks for minutes
without one. So this module never imports it; ``loggers.wandb_process`` does.
"""

from __future__ import annotations

import os
from typing import Any

from hpc_train.config.schema import WandbConfig
from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.loggers.process_logger import ProcessLogger
from hpc_train.loggers.wandb_key import effective_mode


class WandbLogger(ProcessLogger):
    """Shows the newest row as the run's newest values; the curves show it once it is final."""

    def __init__(self, context: LoggerContext) -> None:
        settings = context.experiment.logging.wandb
        assert settings is not None, "the wandb logger needs logging.wandb"
        message = start_message(context, settings)
        super().__init__(
            "wandb",
            "hpc_train.loggers.wandb_process",
            message,
            environment(),
            waits_for_start=effective_mode(settings.mode) == "offline",
        )

    def log(self, row: Row) -> None:
        """Show the row's values."""
        self._tell(newest=row)


def environment() -> dict[str, str]:
    """Return the environment of a process that talks to wandb."""
    # A service started by an outer wandb run is not ours.
    return {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}


def start_message(context: LoggerContext, settings: WandbConfig) -> dict[str, Any]:
    """Return the settings for ``loggers.wandb_process``; the API key is in its environment alone."""
    return {
        "mode": settings.mode,
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
