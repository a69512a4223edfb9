"""The resources that a run has used, from its records, launcher and accounting: for ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_train.errors import HpcTrainError
from hpc_train.launchers.base import AccountingLauncher, Launcher
from hpc_train.launchers.lookup import launcher_in
from hpc_train.report.metrics_reader import Row
from hpc_train.report.usage import Usage, usage_of

if TYPE_CHECKING:
    from hpc_train.report.run_files import RunFiles
    from hpc_train.run.run_status import RunStatus
    from hpc_train.topology.degrees import Ranks


def used_by(
    run: RunFiles, now: RunStatus, rows: Sequence[Row], share: float, *, with_accounting: bool
) -> Usage | None:
    """Return the run's usage; None before its first attempt.

    ``rows`` and ``share``: see ``usage_of``. ``with_accounting``: also query the scheduler, which takes time
    for each run.
    """
    if not run.recorded:
        return None
    launcher = launcher_in(run.paths, run.facts)
    job = None
    if with_accounting and isinstance(launcher, AccountingLauncher):
        job = launcher.job_usage(run.paths)
    return usage_of(run, now, rows, share, _size(run, launcher), job)


def _size(run: RunFiles, launcher: Launcher) -> Ranks | None:
    """Return the ranks, GPUs and cores of an attempt if the launcher started it now; None if unknown."""
    record, experiment = run.newest_record, run.experiment
    devices = None if record is None else record.devices or record.ranks
    try:
        return None if experiment is None else launcher.ranks(experiment, devices)
    except (HpcTrainError, OSError):
        return None
