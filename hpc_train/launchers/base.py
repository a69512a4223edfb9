"""The protocol of a launcher plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from hpc_train.config.schema import Experiment
from hpc_train.errors import ExitCode
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run_folder.status import RunStatus


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


@dataclass(frozen=True)
class QueuedRun:
    """A run to put into a queue."""

    paths: RunPaths
    #: With the changes of its attempts so far, and those noted for the next.
    experiment: Experiment
    #: The experiment file's own text for ``file:line:col``, where there is one.
    problem: Callable[[str, str, str], str] | None = None


@runtime_checkable
class QueueingLauncher(Protocol):
    """A launcher that hands runs to a scheduler, many at once; attempts are claimed where they start.

    Commands look for it by these methods; ``Launcher.launch`` is not needed then.
    """

    def scripts(self, folder: ExperimentPaths, runs: Sequence[QueuedRun]) -> list[str]:
        """Return the batch scripts that ``enqueue`` would submit; nothing is written, no scheduler asked."""

    def submitting(self, folder: ExperimentPaths) -> AbstractContextManager[None]:
        """Hold the experiment's submission lock; first finish what a command that died left half done."""

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Tell whether the run was made but never reached a queue. Only within ``submitting``."""

    def enqueue(self, folder: ExperimentPaths, runs: Sequence[QueuedRun]) -> ExitCode | None:
        """Submit runs whose folders and snapshots exist. Only within ``submitting``.

        Return TRY_AGAIN where the scheduler has accepted a job that it can never start, and say why; else
        DONE or None.

        Raises NoSlurmError where the scheduler does not answer (the next ``submitting`` finishes it),
        BadFileError where it refuses: then nothing of these runs is queued.
        """

    def standings(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Return where runs stand, by folder and scheduler; correct ``status.json`` where they differ.

        Where the scheduler does not answer, the folders' word; ``is_fresh``, which takes no answer of a
        moment ago either, raises NoSlurmError then.
        """

    def cancel(self, runs: Sequence[RunPaths]) -> None:
        """End the runs' jobs for good and write them down as ``cancelled``."""
