"""Predicts from Slurm when jobs would start, and which jobs would never start, before they are submitted.

Called by ``launcher`` for ``plan``, ``submit`` and ``resume``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from hpc_train.config.schema import Experiment
from hpc_train.errors import NoSchedulerError, counted
from hpc_train.launchers.base import JobForecast, KeyProblem, StartRequest
from hpc_train.launchers.slurm import cluster_facts, commands, job_arrays, profiles, request_checks, sbatch
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts
from hpc_train.launchers.slurm.job_limits import max_submit
from hpc_train.paths import ExperimentPaths, RunPaths

#: ``sbatch: Job 1 to start at 2026-11-25T01:42:26 using 1 processors on nodes n1 in partition low``.
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b.*? on (?:nodes? )?(\S+)")
_ERROR = re.compile(r"(sbatch: )?(error: |fatal: )?(allocation failure: )?")
#: Jobs of a sweep whose start is queried: each query takes a fraction of a second.
_JOBS_ASKED = 20


def never_starts(experiments: Sequence[Experiment]) -> list[KeyProblem]:
    """Return why Slurm would refuse these runs, or hold them forever, once per distinct request.

    Raises NoSchedulerError if Slurm does not answer, BadFileError for a profile.
    """
    alike = {str(exp.slurm): exp for exp in experiments if exp.slurm is not None}
    if not alike or not _is_here():
        return []
    try:
        facts = cluster_facts.read()
    except commands.RefusedError as error:  # facts that this user may not read; sbatch checks again
        raise NoSchedulerError(str(error)) from error
    if facts.rewrites_requests:
        return []  # Slurm will check a request other than the file's
    problems = list(_too_many(experiments, facts))
    for experiment in alike.values():
        assert experiment.slurm is not None
        profile = profiles.find(experiment.slurm.profile)
        slurm = profile.applied(experiment).slurm
        assert slurm is not None
        extra = {**profile.sbatch, **slurm.extra}
        problems += request_checks.problems(slurm.model_copy(update={"extra": extra}), facts)
    return list(dict.fromkeys(problems))


def _is_here() -> bool:
    """Return True if Slurm is installed: plans are made on other machines, too."""
    try:
        sbatch.check_programs()
    except NoSchedulerError:
        return False
    return True


def _too_many(experiments: Sequence[Experiment], facts: ClusterFacts) -> list[KeyProblem]:
    """Return the limits on a user's jobs that these runs exceed."""
    slurm, runs = experiments[0].slurm, len(experiments)
    assert slurm is not None
    most_jobs = facts.number("MaxJobCount")
    limits = [] if most_jobs is None else [("MaxJobCount", most_jobs)]
    slurm = request_checks.with_defaults(slurm)
    by_partition = [max_submit(slurm, facts, place) for place in request_checks.used(slurm, facts)]
    maxima = [limit for limit in by_partition if limit is not None]
    if maxima and len(maxima) == len(by_partition):
        limits.append(max(maxima, key=lambda limit: limit[1]))
    message = "{} are more than the {} jobs that this cluster takes of you at once ({})"
    remedy = "write a smaller grid, and submit the rest once these have ended"
    return [
        KeyProblem("sweep", message.format(counted(runs, "run"), most, name), remedy)
        for name, most in limits
        if runs > most
    ]


def forecast(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
    """Query by ``sbatch --test-only`` when each job would start.

    Raises NoSchedulerError if Slurm does not answer, BadFileError if no script can be made.
    """
    if not _is_here():
        return []
    batches = job_arrays.shown_batches(folder, runs, job_arrays.array_limit())
    forecasts = []
    for batch, group in batches[:_JOBS_ASKED]:
        paths = [run.paths for run in group]
        try:
            output = sbatch.tested(batch, len(group))
        except commands.RefusedError as error:
            forecasts.append(JobForecast(paths, note=_ERROR.sub("", error.words)))
        else:
            forecasts.append(_parsed(paths, output))
    return forecasts


def _parsed(runs: Sequence[RunPaths], output: str) -> JobForecast:
    match = _STARTS.search(output)
    if match is None:
        return JobForecast(runs)
    start = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return JobForecast(runs, start.isoformat(), match[2])
