"""``SlurmLauncher``: runs in Slurm's queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import (
    CheckRequest,
    JobForecast,
    JobSection,
    JobUsage,
    KeyProblem,
    Ranks,
    StartRequest,
)
from hpc_train.launchers.findings import Finding
from hpc_train.launchers.slurm import queue_status, scancel
from hpc_train.launchers.slurm.queue_cache import MAX_AGE_S
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.run_status import RunStatus

if TYPE_CHECKING:
    from hpc_train.config.schema import Experiment
    from hpc_train.launchers.slurm.job_arrays import JobArrays
    from hpc_train.plan.devices import Device

_NO_SECTION = KeyProblem(
    "slurm",
    "is missing: the file says nothing of what to ask Slurm for",
    "write `slurm: {}` for one node as the site gives it, or add --local to train on this machine",
)


class SlurmLauncher:
    """A ``Launcher`` over sbatch, squeue, scontrol and sacct; also a ``ClusterLauncher``, a
    ``ForecastLauncher`` and an ``AccountingLauncher``.
    """

    title, is_queue = "Slurm", True

    @cached_property
    def _job_arrays(self) -> JobArrays:
        """What starts runs; `status` and `cancel`, which a person waits for, do without its imports."""
        from hpc_train.launchers.slurm.job_arrays import JobArrays

        return JobArrays()

    def problems(self, experiment: Experiment) -> list[KeyProblem]:
        return [] if experiment.slurm is not None else [_NO_SECTION]

    def choose_devices(self, experiment: Experiment, devices: int | None) -> int | None:
        return None

    def ranks(self, experiment: Experiment, devices: int | None) -> Ranks:
        if experiment.slurm is None:
            return Ranks(1, 1, 1, gpu_hours=0.0)
        return self._job_arrays.ranks(experiment.slurm)

    def device(self, experiment: Experiment, size: Ranks) -> Device | None:
        from hpc_train.launchers.slurm.rank_memory import device_of_job

        if experiment.slurm is None:
            return None
        return device_of_job(experiment.slurm, experiment.device, size)

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        return self._job_arrays.scripts(folder, runs)

    def submitting(self, folder: ExperimentPaths) -> AbstractContextManager[None]:
        return self._job_arrays.submitting(folder)

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        return self._job_arrays.is_unsubmitted(paths)

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        return self._job_arrays.start(folder, runs)

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        return queue_status.statuses(runs, max_age_s=0 if is_fresh else MAX_AGE_S)

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        scancel.cancel(runs)
        return []

    def output(self, paths: RunPaths) -> Path | None:
        return queue_status.output_without_logs(paths)

    def checks(self, request: CheckRequest) -> list[Finding]:
        from hpc_train.launchers.slurm import cluster_checks

        return cluster_checks.check(request)

    def node_checks(self, request: CheckRequest, nodes: Sequence[str], limit_s: float) -> list[Finding]:
        from hpc_train.launchers.slurm import check_job

        return check_job.check_nodes(request.experiment, nodes, limit_s)

    def job_section(self, queue: str | None, gpus_per_node: int | None) -> JobSection:
        from hpc_train.launchers.slurm import cluster_facts, section

        return section.job_section(cluster_facts.read(), queue, gpus_per_node)

    def never_starts(self, experiments: Sequence[Experiment]) -> list[KeyProblem]:
        from hpc_train.launchers.slurm import forecast

        return forecast.never_starts(experiments)

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
        from hpc_train.launchers.slurm import forecast

        return forecast.forecast(folder, runs)

    def job_usage(self, paths: RunPaths) -> JobUsage | None:
        from hpc_train.launchers.slurm import accounting

        return accounting.job_usage(paths)
