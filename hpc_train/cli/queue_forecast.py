"""The queue's forecast for jobs that are not submitted yet: jobs that would never start, and start times.

Called by ``plan``, ``submit`` and ``resume``. Empty for a launcher that is not a ``ForecastLauncher``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

from hpc_train.console import say
from hpc_train.errors import BadFileError, NoSchedulerError, counted
from hpc_train.experiment.plan.planning import Plan, PlannedRun
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import ForecastLauncher, JobForecast, Launcher, SharingLauncher, StartRequest
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root


class JobForecastJson(TypedDict):
    """When the scheduler would start a job."""

    #: The ids of its runs.
    runs: list[str]
    #: In UTC.
    earliest_start: str | None
    nodes: str | None
    note: str | None


@dataclass(frozen=True)
class QueueForecast:
    """``jobs`` is None if the queue did not answer."""

    #: Lines on why jobs would be refused, or held for ever.
    refused: Sequence[str] = ()
    jobs: Sequence[JobForecast] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the keys of ``plan --json``."""
        jobs = [
            JobForecastJson(
                runs=[paths.folder.name for paths in job.runs],
                earliest_start=job.earliest_start,
                nodes=job.nodes or None,
                note=job.note or None,
            )
            for job in self.jobs or ()
        ]
        return {"refused": list(self.refused), "jobs": None if self.jobs is None else jobs}


def never_starting(launcher: Launcher, loaded: Loaded, name: str, runs: Sequence[PlannedRun]) -> list[str]:
    """Return the lines on runs that the queue would refuse, or never start; none if it does not answer.

    The submission has its own time limit. ``name``: the experiment's.
    """
    try:
        return _refused(loaded, _forecast(launcher, loaded, name, runs))
    except NoSchedulerError:
        return []


def refuse_never_starting(launcher: Launcher, resumed: Mapping[RunPaths, Loaded]) -> None:
    """Raise BadFileError if the queue would refuse one of these runs, or never start it."""
    if not resumed or not isinstance(launcher, ForecastLauncher):
        return
    requests = [StartRequest(paths, loaded.experiment, loaded.problem) for paths, loaded in resumed.items()]
    with suppress(NoSchedulerError):
        jobs = launcher.forecast(requests[0].paths.siblings, requests)
        if refusals := _refused(next(iter(resumed.values())), jobs):
            raise BadFileError(refusals)


def ask(launcher: Launcher, loaded: Loaded, plan: Plan) -> QueueForecast:
    """Query the queue about the jobs that ``submit`` would submit; report if it does not answer."""
    try:
        jobs = _forecast(launcher, loaded, plan.name, to_submit(plan))
    except NoSchedulerError as error:
        say(f"{error}; whether and when jobs would start is unknown")
        return QueueForecast()
    refused = _refused(loaded, jobs or ())
    return QueueForecast(refused, None if refused else jobs)


def say_forecast(forecast: QueueForecast, plan: Plan) -> None:
    """Print each job's expected start, or why it would not start."""
    for job in forecast.jobs or ():
        which = _which(job, plan)
        if job.earliest_start is not None:
            nodes = f" on {job.nodes}" if job.nodes else ""
            say(f"{which}earliest start: {_local(job.earliest_start)}{nodes}")
        elif job.note:
            say(f"{which}could not start now: {job.note}")


def shared_jobs(launcher: Launcher, loaded: Loaded, plan: Plan) -> list[str]:
    """Return the lines on jobs that several runs of the plan share."""
    if not isinstance(launcher, SharingLauncher):
        return []
    requests = _requests(loaded, plan.name, to_submit(plan))
    return launcher.shared_jobs(requests) if requests else []


def to_submit(plan: Plan) -> list[PlannedRun]:
    """Return the runs that do not exist yet: ``submit`` leaves the others to ``resume``."""
    folder = runs_root() / plan.name
    return [run for run in plan.runs if not RunPaths(folder / run.id).run.is_file()]


def _forecast(
    launcher: Launcher, loaded: Loaded, name: str, runs: Sequence[PlannedRun]
) -> list[JobForecast] | None:
    if not isinstance(launcher, ForecastLauncher):
        return None
    requests = _requests(loaded, name, runs)
    return launcher.forecast(ExperimentPaths(runs_root() / name), requests) if requests else []


def _requests(loaded: Loaded, name: str, runs: Sequence[PlannedRun]) -> list[StartRequest]:
    folder = runs_root() / name
    return [StartRequest(RunPaths(folder / run.id), run.experiment, loaded.problem) for run in runs]


def _refused(loaded: Loaded, jobs: Sequence[JobForecast] | None) -> list[str]:
    problems = [problem for job in jobs or () for problem in job.problems]
    return list(dict.fromkeys(loaded.problem(*problem) for problem in problems))


def _which(job: JobForecast, plan: Plan) -> str:
    """Return the runs of a job, if the plan has more than one job."""
    if len(job.runs) == len(plan.runs):
        return ""
    first = job.runs[0].folder.name
    return f"{first}: " if len(job.runs) == 1 else f"{counted(len(job.runs), 'run')} from {first}: "


def _local(utc: str) -> str:
    """Return the local time: ``today 14:05``."""
    time = datetime.fromisoformat(utc).astimezone()
    days = (time.date() - datetime.now(UTC).astimezone().date()).days
    day = {0: "today", 1: "tomorrow"}.get(days, f"{time:%Y-%m-%d}")
    return f"{day} {time:%H:%M}"
