"""What Slurm says of jobs before they are submitted: when each would start, and which never would.

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
#: Jobs of a sweep for which Slurm is asked when they would start: each takes a fraction of a second.
_JOBS_ASKED = 20


def never_starts(experiments: Sequence[Experiment]) -> list[KeyProblem]:
    """Return why Slurm would refuse these runs, or hold them for ever; runs of one request once.

    Raises NoSchedulerError where Slurm does not answer, BadFileError on a profile.
    """
    alike = {str(each.slurm): each for each in experiments if each.slurm is not None}
    if not alike or not _is_here():
        return []
    try:
        facts = cluster_facts.read()
    except commands.RefusedError as error:  # facts that this user may not read: sbatch has its own say
        raise NoSchedulerError(str(error)) from error
    if facts.rewrites_requests:
        return []  # what Slurm will check is not what the file says
    found = list(_too_many(experiments, facts))
    for experiment in alike.values():
        assert experiment.slurm is not None
        profile = profiles.find(experiment.slurm.profile)
        slurm = profile.applied(experiment).slurm
        assert slurm is not None
        extra = {**profile.sbatch, **slurm.extra}
        found += request_checks.problems(slurm.model_copy(update={"extra": extra}), facts)
    return list(dict.fromkeys(found))


def _is_here() -> bool:
    """Tell whether Slurm is installed: plans are made on other machines, too."""
    try:
        sbatch.check_programs()
    except NoSchedulerError:
        return False
    return True


def _too_many(experiments: Sequence[Experiment], facts: ClusterFacts) -> list[KeyProblem]:
    """Return that the runs are more than Slurm takes of this user at once."""
    slurm, runs = experiments[0].slurm, len(experiments)
    assert slurm is not None
    most_jobs = facts.number("MaxJobCount")
    limits = [] if most_jobs is None else [("MaxJobCount", most_jobs)]
    slurm = request_checks.with_defaults(slurm)
    by_partition = [max_submit(slurm, facts, each) for each in request_checks.used(slurm, facts)]
    known = [each for each in by_partition if each is not None]
    if known and len(known) == len(by_partition):
        limits.append(max(known, key=lambda each: each[1]))
    message = "{} are more than the {} jobs that this cluster takes of you at once ({})"
    remedy = "write a smaller grid, and submit the rest once these have ended"
    return [
        KeyProblem("sweep", message.format(counted(runs, "run"), most, name), remedy)
        for name, most in limits
        if runs > most
    ]


def forecast(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
    """Ask ``sbatch --test-only`` when each job would start.

    Raises NoSchedulerError where Slurm does not answer, BadFileError where no script can be made.
    """
    if not _is_here():
        return []
    asked = job_arrays.shown_batches(folder, runs, job_arrays.array_limit())
    found = []
    for batch, group in asked[:_JOBS_ASKED]:
        paths = [run.paths for run in group]
        try:
            said = sbatch.tested(batch, len(group))
        except commands.RefusedError as error:
            found.append(JobForecast(paths, note=_ERROR.sub("", error.words)))
        else:
            found.append(_parsed(paths, said))
    return found


def _parsed(runs: Sequence[RunPaths], said: str) -> JobForecast:
    match = _STARTS.search(said)
    if match is None:
        return JobForecast(runs)
    start = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return JobForecast(runs, start.isoformat(), match[2])
