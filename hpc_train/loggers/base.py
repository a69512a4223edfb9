"""The protocol of a logger plug-in. Loggers exist only on rank 0 and must never stop or slow training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpc_train.experiment.config.schema import Job
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import Row as Row


@dataclass(frozen=True)
class LoggerContext:
    """Information for a logger at its start."""

    experiment: Job
    paths: RunPaths
    run_id: str
    attempt: int
    #: Stays the same over all attempts of the run.
    wandb_id: str
    args: dict[str, Any]


class LoggerOffError(Exception):
    """Raised by the constructor of a logger that the user has turned off; the message names the setting."""


class Logger(Protocol):
    """Constructed as ``Logger(context)`` at the start of each attempt.

    It is constructed and called in one thread, which is not the main thread. A logger that has not returned
    after 10 s, which all loggers share, is abandoned.

    Rows arrive in the order of their steps. A row is provisional until a checkpoint contains its step: a
    rollback, or a resume after a crash, continues from the newest checkpoint and logs the later steps again.
    A logger that must not show rows twice implements ``WithdrawsRows`` or ``AwaitsCommit`` too.
    """

    def log(self, row: Row) -> None:
        """Log one row (``time``, ``attempt``, ``split``, ``step``, ``epoch``, metrics); return at once."""

    def close(self, state: str) -> None:
        """Finish, within seconds; ``state`` is how the attempt ended (``completed``, ``failed``, …)."""


@runtime_checkable
class LogsImages(Protocol):
    """Optional: a logger that shows the images of evaluations."""

    def log_images(self, row: Row, images: Mapping[str, Path]) -> None:
        """Log the images of the evaluation of ``row``, the ``val`` row logged just before.

        ``images``: name → PNG file in the run folder, which exists as long as the row is valid; not empty.
        """


@runtime_checkable
class WithdrawsRows(Protocol):
    """Optional: a logger that can withdraw rows."""

    def rows_withdrawn(self, after_step: int) -> None:
        """Rows of steps past ``after_step``, of this attempt or an earlier one, are withdrawn."""


@runtime_checkable
class AwaitsCommit(Protocol):
    """Optional: a logger that publishes rows once they are final."""

    def rows_committed(self, up_to_step: int) -> None:
        """Rows of steps up to ``up_to_step`` are final, including rows logged by earlier attempts."""


@runtime_checkable
class LimitsItself(Protocol):
    """Optional: a logger whose ``close`` may take more than 10 s, and ends by itself."""

    @property
    def close_limit_s(self) -> float:
        """The limit in seconds; at most 90 count."""
