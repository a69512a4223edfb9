"""The protocol of launchers, which start the ranks of a run as processes, here or through a queue.

Commands use launchers only through ``Launcher``. A plug-in that starts one attempt and follows it needs
``AttemptLauncher`` only: ``following.FollowingLauncher`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from hpc_train.errors import ExitCode
from hpc_train.experiment.topology.degrees import Ranks as Ranks  # exported for plug-ins
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.run_status import RunStatus

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Experiment, Job
    from hpc_train.experiment.plan.devices import Device


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt to start: an existing run folder, and the options of the command."""

    paths: RunPaths
    experiment: Job
    attempt: int
    #: Ranks on this machine (``--devices``); None: one per GPU, or one.
    devices: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


class AttemptLauncher(Protocol):
    """Starts one attempt. Constructed without arguments.

    Optional: ``choose_devices(devices, experiment)`` returns how many ranks it will start for ``--devices``
    (None: not given). Without it ``plan`` knows the number of ranks only for runs started with the option.
    """

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        """Start the attempt's ranks. A launcher that waits for the end calls ``poll`` a few times per second
        and returns how the attempt ended; another returns ``DONE`` once it is queued.

        The attempt is recorded, and the run is ``pending``, before the call. If it raises or returns another
        code without having written an end, the caller writes one.
        """


#: Called with the run and the attempt's number; returns a context with the function to call for progress.
Polling: TypeAlias = Callable[[RunPaths, int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class StartRequest:
    """A run to start. Its folder and the snapshot of its code exist."""

    paths: RunPaths
    #: Including the changes made by its attempts so far and by the next one.
    experiment: Job
    #: Renders a problem of a key with ``file:line:col``, if there is an experiment file.
    problem: Callable[[str, str, str], str] | None = None
    #: Ranks on this machine (``--devices``); None: not given.
    devices: int | None = None
    #: Changes the run for the attempt of this number. Called once no other command can start it.
    prepare: Callable[[int], None] = lambda attempt: None
    #: The newest attempt when the command saw that it had ended; 0: there was none.
    after: int = 0
    #: Shows progress while a launcher follows the attempt.
    polling: Polling = lambda _paths, _attempt: nullcontext(lambda: None)


class KeyProblem(NamedTuple):
    """A key of the experiment file without which a launcher can't start the run."""

    key: str
    message: str
    remedy: str


@runtime_checkable
class Launcher(Protocol):
    """Constructed without arguments."""

    #: Starts all runs of a command at once and returns when they are queued; jobs claim their attempts at
    #: their start. Otherwise it starts one run at a time and follows it to its end.
    is_queue: bool

    @property
    def title(self) -> str:
        """Its name in messages."""

    def problems(self, experiment: Job) -> list[KeyProblem]:
        """Return the keys that this launcher needs and the experiment file lacks."""

    def choose_devices(self, experiment: Job, devices: int | None) -> int | None:
        """Return how many ranks it starts here for ``--devices`` (None: not given); None if unknown. Raises
        UsageError if this machine has too few devices.
        """

    def ranks(self, experiment: Job, devices: int | None) -> Ranks:
        """Return how many ranks a run will have. ``devices``: as ``choose_devices`` returned them."""

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return the batch scripts that ``start`` would submit; no files are written, no scheduler called."""

    def submitting(self, folder: ExperimentPaths) -> AbstractContextManager[None]:
        """Hold the experiment's submission lock; first finish the submissions of killed commands."""

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Return True if the run was created but never queued. Only within ``submitting``."""

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Start the runs. Only within ``submitting``; one run if ``is_queue`` is false.

        Return how it ended; for a queue DONE, or TRY_AGAIN, with the reason printed, if the scheduler has
        accepted a job that it can never start.

        Raises NoSchedulerError if the scheduler does not answer (the next ``submitting`` finishes it),
        BadFileError if it refuses: then none of these runs is queued, and they are unchanged.
        """

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Return the status of runs, by folder and scheduler; correct ``status.json`` if they differ.

        If the scheduler does not answer, the status is read from the folders. ``is_fresh`` accepts no cached
        answer and raises NoSchedulerError instead.
        """

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        """End the runs for good and record them as ``cancelled``; return the runs that it can't end."""

    def output(self, paths: RunPaths) -> Path | None:
        """Return the newest job's output file if none of its ranks has written a log; else None."""


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    #: Runs would fail, or lose work that they need not lose.
    ERROR = "error"
    #: Runs work, but with less than they could have, or only under a condition that ``why`` names.
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """The result of one check. Texts may contain names of a cluster: print them by ``console`` only."""

    #: ``error``, ``warning`` or ``ok``.
    level: Level
    #: Name of the check, the same in all versions.
    check: str
    #: The observation, with its value.
    what: str
    #: Its source: a command, a file, a node.
    source: str = ""
    #: The consequence for a run. Empty for ``ok``.
    why: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as an entry of ``findings`` of ``doctor --json``."""
        return vars(self) | {"level": str(self.level)}


@dataclass(frozen=True)
class CheckRequest:
    """The checks that ``doctor`` requests of a launcher."""

    #: The given experiment; None: check the cluster only.
    experiment: Job | None = None
    #: Renders a key of the file as ``file:line:col: key``, for findings about one.
    place: Callable[[str], str] = str


@dataclass(frozen=True)
class JobSection:
    """A section of the experiment file that fits the cluster, for ``init``."""

    #: Keys and values, in order.
    values: dict[str, str | int]
    ranks: int = 1
    has_gpus: bool = False
    #: Other choices: lines for comments.
    notes: Sequence[str] = ()


@runtime_checkable
class KnowsDevices(Protocol):
    """Optional: a ``Launcher`` that knows the ranks' device from the file. ``plan`` compares its memory."""

    def device(self, experiment: Job, size: Ranks) -> Device | None:
        """Return the device of each rank; None if the file does not determine it."""


@runtime_checkable
class ClusterLauncher(Protocol):
    """Optional methods of a ``Launcher`` whose cluster ``doctor`` and ``init`` can examine."""

    def checks(self, request: CheckRequest) -> list[Finding]:
        """Return the findings on the cluster's configuration. Raises NoSchedulerError without an answer."""

    def node_checks(self, request: CheckRequest, nodes: Sequence[str], limit_s: float) -> list[Finding]:
        """Run a small job on each of these nodes, or on one that the scheduler chooses, and return its
        findings. Jobs that have not ended after ``limit_s`` are cancelled.
        """

    def job_section(self, queue: str | None, gpus_per_node: int | None) -> JobSection:
        """Return the section for a job in this or the best queue. NoSchedulerError, UsageError."""


@dataclass(frozen=True)
class JobForecast:
    """A scheduler's forecast for one job before it is submitted."""

    runs: Sequence[RunPaths]
    #: UTC, ISO 8601; None if the scheduler does not report it.
    earliest_start: str | None = None
    #: The nodes on which it would start then, in the scheduler's notation.
    nodes: str = ""
    #: Why the job would not start now, as text; it may start later.
    note: str = ""
    #: Why the scheduler would refuse the job, or never start it.
    problems: Sequence[KeyProblem] = ()


@runtime_checkable
class ForecastLauncher(Protocol):
    """Optional method of a ``Launcher``: ``plan`` shows when jobs would start, and ``plan``, ``submit`` and
    ``resume`` refuse jobs with ``JobForecast.problems``.
    """

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
        """Return when each job of these runs would start. Raises NoSchedulerError without an answer."""


@runtime_checkable
class UsesNodes(Protocol):
    """Optional methods of a ``Launcher`` that starts runs on nodes which the user already has."""

    def use_nodes(self, count: int | None) -> None:
        """Use this number of nodes; None: all. Raises UsageError if there are too few, or none."""

    def slots(self, experiment: Job) -> list[dict[str, str]]:
        """Return the variables of each run that trains at the same time; none if runs follow each other."""


@dataclass(frozen=True)
class JobArray:
    """Jobs of a run, numbered from 1, each of which runs ``hpc_train.<module> --job RUN NUMBER``."""

    run: RunPaths
    experiment: Experiment
    module: str
    count: int
    #: The ranks that a job starts on its node.
    ranks: int
    #: The start of PYTHONPATH.
    search_path: Sequence[str]
    #: The batch script and the jobs' output are written to it.
    folder: Path


@runtime_checkable
class ArrayLauncher(Protocol):
    """Optional methods of a ``Launcher`` that submits arrays of jobs for ``verify --submit``."""

    def submit_array(self, array: JobArray) -> str:
        """Return the id of the array's job.

        Raises NoSchedulerError if the scheduler does not answer, BadFileError if it refuses.
        """

    def ended_jobs(self, job: str, numbers: Sequence[int]) -> dict[int, str]:
        """Return number → state of the array's jobs that have ended. Raises NoSchedulerError."""


@dataclass(frozen=True)
class JobUsage:
    """Accounting data of a run's jobs; None: unknown."""

    #: Peak memory in use on one node, and the memory requested per node.
    peak_memory_gib: float | None = None
    requested_memory_gib: float | None = None
    #: CPU time used ÷ CPU time of the allocated cores.
    cpu_efficiency: float | None = None


@runtime_checkable
class SharingLauncher(Protocol):
    """Optional methods of a ``Launcher`` in whose jobs several runs may train at the same time."""

    def shared_jobs(self, runs: Sequence[StartRequest]) -> list[str]:
        """Return a line on each kind of job that several of these runs share: its number and its request."""


@runtime_checkable
class MultiClusterLauncher(Protocol):
    """Optional methods of a ``Launcher`` whose runs may be in the queue of another cluster."""

    def other_cluster(self, paths: RunPaths) -> str | None:
        """Return the name of the cluster that has the active run's job; None if it is this one."""


@runtime_checkable
class AccountingLauncher(Protocol):
    """Optional methods of a ``Launcher`` for which ``status`` shows the usage of a run's jobs."""

    def job_usage(self, paths: RunPaths) -> JobUsage | None:
        """Return the usage of the run's jobs; None without accounting or without an answer."""
