"""Asks Slurm by ``sbatch --test-only`` when jobs would start, and which it would refuse, before a submission.

Called by ``launcher`` for ``plan``, ``submit``, ``resume`` and ``doctor``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.base import JobForecast, StartRequest
from hpc_train.launchers.slurm import commands, job_arrays, refusals, sbatch
from hpc_train.launchers.slurm.script import Batch
from hpc_train.paths import ExperimentPaths

#: ``sbatch: Job 1 to start at 2026-11-25T01:42:26 using 1 processors on nodes n1 in partition low``.
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b.*? on (?:nodes? )?(\S+)")
_ERROR = re.compile(r"(sbatch: )?(error: |fatal: )?(allocation failure: )?")
#: Jobs of a sweep whose start is queried: each query takes a fraction of a second.
_JOBS_ASKED = 20


def forecast(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
    """Return the forecast for each job of the runs; empty if Slurm is not installed, as for plans elsewhere.

    Raises NoSchedulerError if Slurm does not answer, BadFileError if no script can be made.
    """
    try:
        sbatch.check_programs()
    except NoSchedulerError:
        return []
    batches = job_arrays.shown_batches(folder, runs, job_arrays.array_limit())
    return [_forecast(batch, group) for batch, group in batches[:_JOBS_ASKED]]


def _forecast(batch: Batch, runs: Sequence[StartRequest]) -> JobForecast:
    paths, experiment = [run.paths for run in runs], runs[0].experiment
    try:
        output = sbatch.tested(batch, len(runs))
    except commands.RefusedError as error:
        problems = refusals.refused_in_test(error.words, experiment)
        return JobForecast(paths, note=_ERROR.sub("", error.words), problems=problems)
    problems = refusals.time_limit_problems(experiment)
    match = _STARTS.search(output)
    if match is None:
        return JobForecast(paths, problems=problems)
    start = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return JobForecast(paths, start.isoformat(), match[2], problems=problems)
