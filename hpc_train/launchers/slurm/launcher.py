"""``SlurmLauncher``: runs in Slurm's queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpc_train.errors import BadFileError, ExitCode
from hpc_train.launchers import base
from hpc_train.launchers.base import CheckRequest, KeyProblem, Ranks, StartRequest
from hpc_train.launchers.slurm import queue_status, scancel, submission
from hpc_train.launchers.slurm.commands import MAX_AGE_S, RefusedError
from hpc_train.launchers.slurm.queue_status import SlurmBase
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.run_status import RunStatus

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job

_NO_SECTION = KeyProblem(
    "slurm",
    "is missing, so there are no resources to request from Slurm",
    "write `slurm: {}` for one node with the site's defaults, or add --local to train on this machine",
)


class SlurmLauncher(SlurmBase):
    """A ``Launcher`` over sbatch, squeue, scontrol and sacct; also a ``ClusterLauncher``, a
    ``ForecastLauncher``, an ``AccountingLauncher``, a ``MultiClusterLauncher``, a ``SharingLauncher`` and an
    ``ArrayLauncher``.
    """

    title, is_queue = "Slurm", True

    def __init__(self) -> None:
        #: Within ``submitting``, before ``start``: the runs that are in a submission, once read.
        self._recorded: set[str] | None = None

    def problems(self, experiment: Job) -> list[KeyProblem]:
        """Return a problem if there is no section ``slurm``; its keys are checked with the file."""
        return [] if experiment.slurm is not None else [_NO_SECTION]

    def ranks(self, experiment: Job, devices: int | None) -> Ranks:
        """Return the ranks that the section ``slurm`` requests; 1 without the section."""
        from hpc_train.launchers.slurm import options
        from hpc_train.launchers.slurm.profiles import slurm_of

        slurm = slurm_of(experiment)
        return Ranks(1, 1, 1, gpu_hours=0.0) if slurm is None else options.ranks(slurm)

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return the batch script of each job array, with a placeholder for the submission's token."""
        from hpc_train.launchers.slurm import job_arrays

        return job_arrays.scripts(folder, runs)

    @contextmanager
    def submitting(self, folder: ExperimentPaths) -> Iterator[None]:
        """Hold the experiment's submission lock. Raises NoSchedulerError if Slurm's programs are missing."""
        from hpc_train.launchers.slurm import job_arrays

        with job_arrays.submitting(folder):
            self._recorded = None
            yield

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Return True if no job and no submission has the run. Only within ``submitting``."""
        if not submission.is_without_job(paths):
            return False
        if self._recorded is None:
            self._recorded = submission.recorded_runs(paths.siblings)
        return paths.folder.name not in self._recorded

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Submit the runs as held job arrays; release them once all are recorded."""
        from hpc_train.launchers.slurm import job_arrays

        self._recorded = None
        return job_arrays.start(folder, runs)

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Query Slurm for active runs; unless ``is_fresh``, answers may be up to ``MAX_AGE_S`` old."""
        return queue_status.statuses(runs, max_age_s=0 if is_fresh else MAX_AGE_S)

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        """End the runs' jobs and wait until they are gone; return the runs of another cluster."""
        return scancel.cancel(runs)

    def other_cluster(self, paths: RunPaths) -> str | None:
        """Return the cluster of the active run's job, if it is not the cluster reached from here."""
        return queue_status.other_cluster(paths)

    def checks(self, request: CheckRequest) -> list[base.Finding]:
        """Check the cluster's configuration and, with a file, its request."""
        from hpc_train.launchers.slurm import cluster_checks

        return cluster_checks.check(request)

    def node_checks(self, request: CheckRequest, nodes: Sequence[str], limit_s: float) -> list[base.Finding]:
        """Run a small job on each node, or on any one. Raises OSError if runs can't be written."""
        from hpc_train.launchers.slurm import check_job

        return check_job.check_nodes(request.experiment, nodes, limit_s)

    def job_section(self, queue: str | None, gpus_per_node: int | None) -> base.JobSection:
        """Return the section ``slurm`` for one node of the partition ``queue``, or of the best one."""
        from hpc_train.launchers.slurm import cluster_facts

        return cluster_facts.job_section(cluster_facts.read(), queue, gpus_per_node)

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[base.JobForecast]:
        """Query ``sbatch --test-only``; empty if Slurm is not installed."""
        from hpc_train.launchers.slurm import job_arrays

        return job_arrays.forecast(folder, runs)

    def shared_jobs(self, runs: Sequence[StartRequest]) -> list[str]:
        """Return a line on each array of jobs with ``slurm.runs_per_job`` runs at a time."""
        from hpc_train.launchers.slurm import job_arrays

        return job_arrays.shared_jobs(runs)

    def submit_array(self, array: base.JobArray) -> str:
        """Submit the array with the request of the section ``slurm``, for one node per job."""
        from hpc_train.launchers.slurm import job_refusals, sbatch, script

        try:
            return sbatch.submitted_array(array, script.array_script(array))
        except RefusedError as error:
            problems = job_refusals.refused(error.words, array.experiment, array.count)
            raise BadFileError([f"{p.key}: {p.message}; {p.remedy}" for p in problems]) from None

    def ended_jobs(self, job: str, numbers: Sequence[int]) -> dict[int, str]:
        """Query squeue and sacct for the array's jobs."""
        from hpc_train.launchers.slurm import queue

        states = queue.ask([(f"{job}_{number}", None) for number in numbers])
        by_number = {number: states.get((f"{job}_{number}", None)) for number in numbers}
        return {number: state.state for number, state in by_number.items() if state and state.is_over}

    def job_usage(self, paths: RunPaths) -> base.JobUsage | None:
        """Query ``sacct`` for all jobs of the run."""
        from hpc_train.launchers.slurm import accounting

        return accounting.job_usage(paths)
