"""The checks before runs start, the same for ``validate``, ``plan``, ``submit``, ``resume`` and ``doctor``.

In this order: keys that don't fit the ranks, the user's own parts, weights, the launcher's keys, the layout
of the data, data that must be on this machine; then the batch scripts; then the budget; then the queue's
forecast: jobs that would never start, and start times, for a launcher that is a ``ForecastLauncher``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from hpc_train.cli.command_options import LauncherOptions
from hpc_train.console import say
from hpc_train.errors import BadFileError, NoSchedulerError, UsageError, counted
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.config.synonyms import key_for
from hpc_train.experiment.plan.planning import Plan, PlannedRun, make_plan
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.experiment.validate.container_rules import missing_paths
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.experiment.validate.rules import unused_without_queue
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers import base, following, lookup
from hpc_train.launchers.base import JobForecast, Launcher, StartRequest, UsesNodes
from hpc_train.loggers.tracker_environment import effective_mode, has_key, needs_key
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.rank.env import count_gpus
from hpc_train.run import weight_source
from hpc_train.run.code.code_files import work_tree_around
from hpc_train.run.found_micro_batch import kept_size


@dataclass(frozen=True)
class LauncherChoice:
    """The launcher that the options of a command select."""

    name: str
    launcher: Launcher
    #: Whether an option selects this machine: ``--local``, ``--launcher local`` or ``--devices``.
    on_this_machine: bool

    @classmethod
    def of(cls, options: LauncherOptions, *, starts: bool = True) -> LauncherChoice:
        """Load the launcher. Raises UsageError if the options exclude each other.

        ``starts``: whether runs will be started, which ``--devices`` alone must not do on this machine.
        """
        here = allocation_of(options) if options.here else None
        is_local = options.local or (options.devices is not None and options.launcher is None)
        if is_local and starts and not options.local:
            raise UsageError("--devices: is for this machine; add --local")
        name = here or options.launcher or (following.LOCAL if is_local else lookup.DEFAULT)
        on_this_machine = options.local or name == following.LOCAL or options.devices is not None
        launcher = lookup.load_launcher(name)
        if launcher.is_queue and on_this_machine:
            option = "--local" if options.local else "--devices"
            raise UsageError(f"{option}: is for this machine, launcher {name} is not; omit one of them")
        use_nodes(launcher, options.nodes, f"submit {getattr(options, 'file', 'FILE')}")
        return cls(name, launcher, on_this_machine)

    def plan(
        self,
        loaded: Loaded,
        devices: int | None,
        trials: Sequence[Mapping[str, Any]] | None = None,
        *,
        chooses: bool = False,
        jobs: int = 1,
    ) -> Plan:
        """Return the plan of the file for this launcher. ``trials``: the values that a search proposes.

        ``chooses``: ``devices`` are the command line's, and the launcher chooses those that this machine has
        for each of ``jobs`` runs at a time. Raises UsageError if there are too few.
        """
        if chooses and jobs > 1:
            devices = devices_per_run(devices, jobs, loaded.experiment.device)
        if chooses:
            devices = self.launcher.choose_devices(loaded.experiment, devices)
        plan = make_plan(
            loaded,
            lambda experiment: self.launcher.ranks(experiment, devices),
            on_this_machine=self.on_this_machine,
            trials=trials,
        )
        return replace(plan, devices=devices)


def devices_per_run(devices: int | None, jobs: int, device: str) -> int:
    """Return the ranks of each run; ``device``: the file's. Raises UsageError if there are too few GPUs."""
    num_gpus = 0 if device == "cpu" else count_gpus(os.environ)
    per_run = devices or max(1, num_gpus // jobs)
    if num_gpus and per_run * jobs > num_gpus:
        raise UsageError(
            f"--jobs: {jobs} runs of {per_run} ranks need {per_run * jobs} GPUs, but this machine "
            f"shows {num_gpus}; write --jobs {max(1, num_gpus // per_run)}, or fewer --devices"
        )
    return per_run


def allocation_of(options: LauncherOptions) -> str:
    """Return the launcher of ``--here``. Raises UsageError if another option selects another launcher."""
    others = {"--local": options.local, "--devices": options.devices, "--launcher": options.launcher}
    for option, value in others.items():
        if value not in (False, None):
            raise UsageError(f"--here and {option} exclude each other; use one of them")
    return lookup.ALLOCATION


def use_nodes(launcher: Launcher, count: int | None, command: str) -> None:
    """Pass ``--nodes`` on. Raises UsageError if the launcher has no nodes yet, or too few.

    ``command``: the one for a queued run, to which its number of nodes is appended.
    """
    if isinstance(launcher, UsesNodes):
        launcher.use_nodes(count)
    elif count is not None:
        key = key_for(("nodes",))
        raise UsageError(f"--nodes: is for --here; in a queue `hpc-train {command} {key}={count}`")


def with_found_sizes(plan: Plan) -> Plan:
    """Return the plan with numbers for ``auto`` if the run exists and has found its size."""
    return replace(plan, runs=[_with_found_size(plan.name, run) for run in plan.runs])


def _with_found_size(name: str, run: PlannedRun) -> PlannedRun:
    size = kept_size(RunPaths(runs_root() / name / run.id)) if run.micro_batches is None else None
    layout = run.layout
    if size is None or layout is None:
        return run
    return replace(run, micro_batches=layout.global_batch_size // size)


def submittable(choice: LauncherChoice, loaded: Loaded) -> Plan:
    """Return the plan of a file that ``submit`` accepts, whatever the queue says. Raises BadFileError."""
    plan = with_found_sizes(choice.plan(loaded, None))
    checks = Preflight(choice.launcher, on_this_machine=choice.on_this_machine, needs_launcher=False)
    if problems := checks.of_plan(loaded, plan).problems:
        raise BadFileError(problems)
    return plan


class Candidate(NamedTuple):
    """A run to check, with the ranks that its launcher would start."""

    experiment: Job
    ranks: Ranks
    paths: RunPaths


class Checked(NamedTuple):
    """Lines of problems, empty if the runs can start."""

    problems: list[str]
    #: Why the budget or the queue refuses the runs; empty if there are problems.
    refused: list[str]
    scripts: list[str]


class Preflight:
    """The checks of runs that one launcher starts."""

    def __init__(self, launcher: Launcher, *, on_this_machine: bool, needs_launcher: bool = True) -> None:
        """``on_this_machine``: the data must be here. ``needs_launcher``: a file without the launcher's
        section has a problem, instead of being checked for any number of ranks on this machine.
        """
        self._launcher = launcher
        self._on_this_machine, self._needs_launcher = on_this_machine, needs_launcher

    def of_plan(
        self,
        loaded: Loaded,
        plan: Plan,
        *,
        budget: Callable[[], list[str]] = list,
        queue: Callable[[], list[str]] = list,
    ) -> Checked:
        """Check new runs; ``budget`` and ``queue`` return the lines of problems with these."""
        lacking = [loaded.problem(*problem) for problem in self._launcher.problems(loaded.experiment)]
        is_unknown = bool(lacking) and not self._needs_launcher
        requests = _requests(loaded, plan.name, plan.runs)
        candidates = [
            Candidate(run.experiment, Ranks() if is_unknown else run.size, request.paths)
            for run, request in zip(plan.runs, requests, strict=True)
        ]
        problems = self._problems(loaded, candidates, lacking_parts(loaded, plan), lacking)
        if problems or lacking:
            return Checked(problems, [], [])
        try:
            scripts = self._launcher.scripts(ExperimentPaths(runs_root() / plan.name), requests)
        except BadFileError as error:
            return Checked(error.problems, [], [])
        return Checked([], budget() or queue(), scripts)

    def of_resumed(self, loaded: Loaded, run: Candidate, budget: Callable[[], list[str]]) -> list[str]:
        """Check a run that continues, with the code and weights that it has."""
        lacking = [loaded.problem(*problem) for problem in self._launcher.problems(loaded.experiment)]
        return self._problems(loaded, [run], [], lacking) or budget()

    def _problems(
        self, loaded: Loaded, runs: Sequence[Candidate], missing: Sequence[str], lacking: Sequence[str]
    ) -> list[str]:
        is_usable = not lacking or self._needs_launcher
        job, workload = loaded.experiment, workload_of(loaded.experiment)
        lines = [
            loaded.source.render(problem)
            for experiment, ranks, paths in runs
            for problem in workload.start_problems(experiment, ranks, paths)
        ]
        lines += [*missing, *(lacking if self._needs_launcher else ())]
        is_queued = is_usable and self._launcher.is_queue
        problem = workload.misplaced_data(job, is_queued=is_queued)
        lines += [] if problem is None else [loaded.source.render(problem)]
        if self._on_this_machine or not is_usable:
            lines += missing_data(loaded)
        return list(dict.fromkeys(lines))


def missing_data(loaded: Loaded, remedy: str | None = None) -> list[str]:
    """Return the problems of data that are missing here: ranks fail only after imports."""
    return _rendered(loaded, lambda: workload_of(loaded.experiment).missing_data(loaded.experiment, remedy))


def missing_packs(loaded: Loaded) -> list[str]:
    """Return the problems of ``missing_data`` that ranks on other machines have, too."""
    job = loaded.experiment

    def packs() -> list[Problem]:
        return [problem for problem in workload_of(job).missing_data(job) if problem.path != ("data", "root")]

    return _rendered(loaded, packs)


def _rendered(loaded: Loaded, find: Callable[[], list[Problem]]) -> list[str]:
    try:
        return list(map(loaded.source.render, find()))
    except BadFileError as error:
        return error.problems


def lacking_parts(loaded: Loaded, plan: Plan) -> list[str]:
    """Return the problems with the user's own code and weights that the plan names and that are missing here.

    A run keeps the weights named now.
    """
    jobs = [run.experiment for run in plan.runs]
    if loaded.stage is not None and loaded.stage.weights is not None:  # they do not exist yet
        jobs = [
            weight_source.with_source(job, None)
            if isinstance(job, Experiment) and job.model.init_from == loaded.stage.weights
            else job
            for job in jobs
        ]
    problems = workload_of(loaded.experiment).missing_code(jobs, _code_root)
    return list(map(loaded.source.render, problems))


def _code_root() -> Path | None:
    tree = work_tree_around(Path.cwd())
    return None if tree is None else tree.root


def say_remarks(loaded: Loaded) -> None:
    """Print the remarks on settings that are valid but probably not intended."""
    say(*map(loaded.source.render, workload_of(loaded.experiment).remarks(loaded.experiment)))


def say_before(choice: LauncherChoice, loaded: Loaded) -> None:
    """Print remarks on the file and on data that are not on this machine."""
    if choice.launcher.is_queue:
        say(*missing_data(loaded, "make sure that the nodes have it; submitting nevertheless"))
        container = loaded.experiment.environment.container
        say(*map(loaded.source.render, missing_paths(container) if container is not None else ()))
    say_remarks(loaded)
    _say_no_key(loaded)
    if not choice.launcher.is_queue:
        unused = unused_without_queue(loaded.experiment, is_local=choice.on_this_machine)
        say(*map(loaded.source.render, unused))


def _say_no_key(loaded: Loaded) -> None:
    """Warn if wandb has no API key; ranks have this command's environment."""
    wandb = loaded.experiment.logging.wandb
    if wandb is None or not needs_key(wandb.mode) or has_key():
        return
    is_offline = effective_mode(wandb.mode) == "offline"
    outcome = "runs log into their folders" if is_offline else "wandb gets nothing of the runs"
    remedy = "set WANDB_API_KEY or run `wandb login` before they start, or write mode: offline"
    problem = f"there is no API key, so {outcome}"
    say(loaded.problem("logging.wandb.mode", problem, remedy, "logging.wandb-key"))


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
    """Return lines on runs that the queue would refuse or never start; none if it does not answer."""
    try:
        return _refused(loaded, _forecast(launcher, loaded, name, runs))
    except NoSchedulerError:
        return []


def refuse_never_starting(launcher: Launcher, resumed: Mapping[RunPaths, Loaded]) -> None:
    """Raise BadFileError if the queue would refuse one of these runs, or never start it."""
    if not resumed or not isinstance(launcher, base.ForecastLauncher):
        return
    requests = [StartRequest(paths, loaded.experiment, loaded.problem) for paths, loaded in resumed.items()]
    with suppress(NoSchedulerError):
        jobs = launcher.forecast(requests[0].paths.siblings, requests)
        if refusals := _refused(next(iter(resumed.values())), jobs):
            raise BadFileError(refusals)


def forecast_queue(launcher: Launcher, loaded: Loaded, plan: Plan) -> QueueForecast:
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
    if not isinstance(launcher, base.SharingLauncher):
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
    if not isinstance(launcher, base.ForecastLauncher):
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
