"""The protocol of launchers: how the ranks of a run come to be processes, here or through a queue.

Commands know launchers by ``Launcher`` alone. A plug-in that starts one attempt and follows it needs
``AttemptLauncher`` only: ``following.FollowingLauncher`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from hpc_train.errors import ExitCode
from hpc_train.launchers.findings import Finding
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.run_status import RunStatus
from hpc_train.topology.degrees import Ranks as Ranks  # a plug-in finds all of its protocol here

if TYPE_CHECKING:
    from hpc_train.config.schema import Experiment
    from hpc_train.plan.devices import Device


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt to start: a run folder that exists, and what the person asked for."""

    paths: RunPaths
    experiment: Experiment
    attempt: int
    #: Ranks on this machine (``--devices``); None: one per GPU, or one.
    devices: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


class AttemptLauncher(Protocol):
    """Starts one attempt. Constructed without arguments.

    Optional: ``choose_devices(devices, experiment)`` returns how many ranks it will start for ``--devices``
    (None: not given). Without it ``plan`` knows the ranks only of a run that is started with the option.
    """

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        """Start the attempt's ranks. A launcher that follows to the end calls ``poll`` a few times a
        second meanwhile and returns how the attempt ended; another returns ``DONE`` once it is queued.

        The attempt is recorded, and the run is ``pending``, before. An end that the launcher does not
        write is written for it: where it raises or returns another code.
        """


def _no_poll(paths: RunPaths, attempt: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class StartRequest:
    """A run to start. Its folder and the snapshot of its code exist."""

    paths: RunPaths
    #: With the changes of its attempts so far, and those of the next.
    experiment: Experiment
    #: Renders a problem of a key with ``file:line:col`` of the experiment file, where there is one.
    problem: Callable[[str, str, str], str] | None = None
    #: Ranks on this machine (``--devices``), where they were asked for.
    devices: int | None = None
    #: Changes the run for the attempt of this number. Called once no other command can start it.
    prepare: Callable[[int], None] = lambda attempt: None
    #: The newest attempt when the command saw that it had ended; 0: there was none.
    after: int = 0
    #: Shows progress: a context that gives what a launcher calls while it follows the attempt.
    polling: Callable[[RunPaths, int], AbstractContextManager[Callable[[], None]]] = _no_poll


class KeyProblem(NamedTuple):
    """A key of the experiment file without which a launcher can't start the run."""

    key: str
    message: str
    remedy: str


@runtime_checkable
class Launcher(Protocol):
    """Constructed without arguments."""

    #: Takes all runs of a command at once and returns when they are queued; their attempts are claimed where
    #: they start. Otherwise it takes one run at a time and follows it to its end.
    is_queue: bool

    @property
    def title(self) -> str:
        """Its name in messages."""

    def problems(self, experiment: Experiment) -> list[KeyProblem]:
        """Return what the experiment file lacks for this launcher."""

    def choose_devices(self, experiment: Experiment, devices: int | None) -> int | None:
        """Return how many ranks it starts here for ``--devices`` (None: not given); None where that does not
        say. Raises UsageError where this machine has too few.
        """

    def ranks(self, experiment: Experiment, devices: int | None) -> Ranks:
        """Return how many ranks a run will have. ``devices``: as ``choose_devices`` returned them."""

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return the batch scripts that ``start`` would submit; nothing is written, no scheduler asked."""

    def submitting(self, folder: ExperimentPaths) -> AbstractContextManager[None]:
        """Hold the experiment's submission lock; first finish what a command that died left half done."""

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Tell whether the run was created but never reached a queue. Only within ``submitting``."""

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Start the runs. Only within ``submitting``; one run where ``is_queue`` is false.

        Return how it ended; for a queue DONE, or TRY_AGAIN where the scheduler has accepted a job that it can
        never start, and say why.

        Raises NoSchedulerError where the scheduler does not answer (the next ``submitting`` finishes it),
        BadFileError where it refuses: then nothing of these runs is queued, and they are as before.
        """

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Return the status of runs, by folder and scheduler; correct ``status.json`` where they differ.

        Where the scheduler does not answer, the folders' word; ``is_fresh``, which takes no answer of a
        moment ago either, raises NoSchedulerError then.
        """

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        """End the runs for good and write them down as ``cancelled``; return those that it can't end."""

    def output(self, paths: RunPaths) -> Path | None:
        """Return what the newest job printed, where none of its ranks has written a log; else None."""


@dataclass(frozen=True)
class CheckRequest:
    """What ``doctor`` asks a launcher to check."""

    #: Of the experiment file that was given; None: the cluster alone.
    experiment: Experiment | None = None
    #: Renders a key of the file as ``file:line:col: key``, for findings about one.
    place: Callable[[str], str] = str


@dataclass(frozen=True)
class JobSection:
    """A section of the experiment file that fits the cluster, for ``init``."""

    #: Keys and values, in order.
    values: dict[str, str | int]
    ranks: int = 1
    has_gpus: bool = False
    #: What else there is to choose from: lines for comments.
    notes: Sequence[str] = ()


@runtime_checkable
class KnowsDevices(Protocol):
    """Optional: a ``Launcher`` that knows from the file what ranks run on. ``plan`` compares its memory."""

    def device(self, experiment: Experiment, size: Ranks) -> Device | None:
        """Return what each rank has; None where the file says nothing of it."""


@runtime_checkable
class ClusterLauncher(Protocol):
    """What a ``Launcher`` has besides if ``doctor`` and ``init`` are to know its cluster. Optional."""

    def checks(self, request: CheckRequest) -> list[Finding]:
        """Return what would fail on this cluster, by its configuration.

        Raises NoSchedulerError where the scheduler does not answer.
        """

    def node_checks(self, request: CheckRequest, nodes: Sequence[str], limit_s: float) -> list[Finding]:
        """Run a small job on each of these nodes, or on one that the scheduler chooses, and return what it
        found there. Jobs that have not ended after ``limit_s`` are cancelled.
        """

    def job_section(self, queue: str | None, gpus_per_node: int | None) -> JobSection:
        """Return the section for a job in this queue, or the best one (None).

        Raises NoSchedulerError, or UsageError where there is no such queue.
        """


@dataclass(frozen=True)
class JobForecast:
    """What a scheduler says of one job before it is submitted."""

    runs: Sequence[RunPaths]
    #: UTC, ISO 8601; None where the scheduler does not say.
    earliest_start: str | None = None
    #: Where it would start then, as the scheduler writes nodes.
    nodes: str = ""
    #: In words, why the job would not start as things are; it may start later.
    note: str = ""


@runtime_checkable
class ForecastLauncher(Protocol):
    """What a ``Launcher`` has besides if ``plan`` is to know when jobs would start, and ``plan``, ``submit``
    and ``resume`` are to refuse jobs that would never start. Optional.
    """

    def never_starts(self, experiments: Sequence[Experiment]) -> list[KeyProblem]:
        """Return why the scheduler would refuse jobs of these runs, or hold them for ever.

        Raises NoSchedulerError where it does not answer.
        """

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
        """Ask the scheduler when each job of these runs would start; nothing is submitted.

        Raises NoSchedulerError where it does not answer.
        """


@dataclass(frozen=True)
class JobUsage:
    """What a scheduler's accounting says of a run's jobs; None: unknown."""

    #: The most that was in use on one node, and what was requested of each.
    peak_memory_gib: float | None = None
    requested_memory_gib: float | None = None
    #: CPU time used ÷ that of the allocated cores.
    cpu_efficiency: float | None = None


@runtime_checkable
class MultiClusterLauncher(Protocol):
    """Optional methods of a ``Launcher`` whose runs may be in the queue of another cluster."""

    def other_cluster(self, paths: RunPaths) -> str | None:
        """Return the name of the cluster that has the active run's job; None if it is this one."""


@runtime_checkable
class AccountingLauncher(Protocol):
    """What a ``Launcher`` has besides if ``status`` is to show what the jobs of a run used. Optional."""

    def job_usage(self, paths: RunPaths) -> JobUsage | None:
        """Return what the run's jobs used; None where the scheduler keeps no account, or does not answer."""
