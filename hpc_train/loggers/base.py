"""The protocol of a logger plug-in. Loggers live on rank 0 alone and may never stop or slow training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hpc_train.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run_folder.metric_rows import Row as Row


@dataclass(frozen=True)
class LoggerContext:
    """What a logger is told at its start."""

    experiment: Experiment
    paths: RunPaths
    run_id: str
    attempt: int
    #: Stays the same over all attempts of the run.
    wandb_id: str
    args: dict[str, Any]


class Logger(Protocol):
    """Constructed as ``Logger(context)`` at the start of each attempt."""

    def log(self, row: Row) -> None:
        """Take one row (``time``, ``attempt``, ``split``, ``step``, ``epoch``, metrics). Returns at once."""

    def close(self, state: str) -> None:
        """Finish, within seconds; ``state`` is how the attempt ended (``completed``, ``failed``, …)."""
