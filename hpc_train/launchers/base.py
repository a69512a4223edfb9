"""The protocol of a launcher plug-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpc_train.config.schema import Experiment
from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt to start: a run folder that exists, and what the person asked for."""

    paths: RunPaths
    experiment: Experiment
    attempt: int
    #: Ranks on this machine (``--devices``); None: one a GPU, or one.
    devices: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


class Launcher(Protocol):
    """Constructed without arguments."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        """Start the attempt's ranks. A launcher that follows to the end calls ``poll`` a few times a
        second meanwhile and returns how the attempt ended; another returns ``DONE`` once it is queued.

        The attempt is recorded, and the run is ``pending``, before. An end that the launcher does not
        write is written for it: where it raises or returns another code.
        """
