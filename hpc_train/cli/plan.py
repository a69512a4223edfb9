"""``plan``, and how a plan is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.found_sizes import with_found_sizes
from hpc_train.console import columns, put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.paths import ExperimentPaths, RunPaths, expanded, runs_root
from hpc_train.plan.planning import Plan, PlannedRun, make_plan
from hpc_train.plan.sweep import describe
from hpc_train.topology.degrees import in_words
from hpc_train.topology.strategy_traits import traits_of
from hpc_train.validate.loading import Loaded, load
from hpc_train.validate.rules import check_start

DEVICES_WITHOUT_LOCAL = "--devices: is for this machine; add --local"
FETCH_DATA = "write the folder of the data, or fetch them with `hpc-train prepare FILE`"
#: Bubble above which ``plan`` says what to do.
_LARGE_BUBBLE = 0.2  # assumed
_HEADS = (
    "run",
    "ranks",
    "micro-batches",
    "accumulation",
    "precision",
    "steps per epoch",
    "steps",
    "GPU-hours",
)


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``plan``."""

    local: bool = False
    devices: int | None = None
    as_json: bool = False
    script: bool = False


def plan(file: Path, overrides: Sequence[str], options: PlanOptions) -> ExitCode:
    """Show what would be started."""
    if options.devices is not None and not options.local:
        raise UsageError(DEVICES_WITHOUT_LOCAL)
    loaded, launcher = load(file, overrides), load_launcher(LOCAL if options.local else DEFAULT)
    devices = options.devices
    if options.local and devices is None:
        devices = launcher.choose_devices(loaded.experiment, None)
    made = with_found_sizes(make_plan(loaded, devices, options.local))
    problems = start_problems(loaded, made)
    scripts: list[str] = []
    lacking = launcher_problems(launcher, loaded)
    if not problems and not lacking:
        try:
            scripts = batch_scripts(launcher, loaded, made)
        except BadFileError as error:
            problems += error.problems
    if options.script:
        problems += lacking
    show(made, as_json=options.as_json, scripts=scripts if options.script or options.as_json else ())
    for line in problems:
        say(line)
    return ExitCode.DONE


def submit_problems(loaded: Loaded, made: Plan) -> list[str]:
    """Return all lines with which ``submit`` would reject the plan, for ``validate``.

    A file that says nothing of a job can be started with ``--local`` on any number of ranks, and reads its
    data here.
    """
    launcher = load_launcher(DEFAULT)
    if launcher.problems(loaded.experiment):
        return start_problems(loaded, made, ranks_are_known=False) + missing_data(loaded, FETCH_DATA)
    if problems := start_problems(loaded, made):
        return problems
    try:
        batch_scripts(launcher, loaded, made)
    except BadFileError as error:
        return error.problems
    return []


def missing_data(loaded: Loaded, remedy: str) -> list[str]:
    """Return the line that reports a data root that is missing here; ranks find out after their imports."""
    root = loaded.experiment.data.root
    if root is None or expanded(root).exists():
        return []
    return [loaded.problem("data.root", f"{root} does not exist on this machine", remedy)]


def launcher_problems(launcher: Launcher, loaded: Loaded) -> list[str]:
    """Return the lines of what the file lacks for the launcher."""
    return [loaded.problem(*problem) for problem in launcher.problems(loaded.experiment)]


def batch_scripts(launcher: Launcher, loaded: Loaded, made: Plan) -> list[str]:
    """Return the scripts of all runs of the plan. Raises BadFileError where none can be made."""
    folder = ExperimentPaths(runs_root() / made.name)
    requests = [
        StartRequest(RunPaths(folder.folder / run.id), run.experiment, loaded.problem) for run in made.runs
    ]
    return launcher.scripts(folder, requests)


def show(made: Plan, *, as_json: bool, scripts: Sequence[str] = ()) -> None:
    """Print the plan, and the batch scripts of its runs, to stdout."""
    if as_json:
        put_json(made.to_json() | {"scripts": list(scripts)})
        return
    for line in columns(_table(made.runs)):
        put(line)
    for hint in dict.fromkeys(map(_hint, made.runs)):
        if hint:
            say(hint)
    for script in scripts:
        put("")
        put(script.rstrip("\n"))


def _table(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Return heads and cells; columns without information are omitted."""
    rows = [[*_HEADS], *map(_cells, runs)]
    if any(len(traits_of(run.experiment.parallel.strategy).degrees) > 1 for run in runs):
        _append(rows, "degrees", ["misfit" if run.degrees is None else in_words(run.degrees) for run in runs])
    if any(run.stages for run in runs):
        _append(rows, "stages", [_stages(run) for run in runs])
        _append(rows, "bubble", [_bubble(run) for run in runs])
    if any(run.values for run in runs):
        _append(rows, "with", [describe(run.values) for run in runs])
    return rows


def _append(rows: list[list[str]], head: str, cells: Sequence[str]) -> None:
    for row, cell in zip(rows, (head, *cells), strict=True):
        row.append(cell)


def _stages(run: PlannedRun) -> str:
    if run.stages is None:
        return "1"
    return f"{run.stages}, {run.schedule or run.experiment.parallel.strategy}"


def _bubble(run: PlannedRun) -> str:
    if run.stages is None:
        return "0 %"
    return "unknown" if run.bubble is None else f"{run.bubble:.0%}".replace("%", " %")


def _hint(run: PlannedRun) -> str | None:
    """Return how to shorten a pipeline's bubble, if it is long."""
    if run.bubble is None or run.bubble <= _LARGE_BUBBLE:
        return None
    waits = f"ranks wait {_bubble(run)} of a step"
    strategy = run.experiment.parallel.strategy
    if not traits_of(strategy).has_schedule:
        return f"parallel.strategy: under {strategy} {waits}; pipeline keeps several micro-batches going"
    return (
        f"parallel.pipeline: {waits}, which has {run.accumulation} micro-batches per pipeline; "
        "a smaller micro_batch_size or a larger global_batch_size makes more of them"
    )


def _cells(run: PlannedRun) -> list[str]:
    by_trial = (run.micro_batches or "auto", run.accumulation or "auto")
    by_data = ("unknown" if number is None else number for number in (run.steps_per_epoch, run.total_steps))
    return [run.id, *map(str, (run.ranks, *by_trial, run.experiment.precision, *by_data)), _hours(run)]


def _hours(run: PlannedRun) -> str:
    if run.gpu_hours is None:
        return "unknown"
    return f"at most {run.gpu_hours:g}" if run.gpu_hours else "0"


def start_problems(loaded: Loaded, made: Plan, *, ranks_are_known: bool = True) -> list[str]:
    """Return the lines on what prevents runs of the plan from being started."""
    lines = [
        loaded.problem(problem.path, problem.message, problem.remedy)
        for run in made.runs
        for problem in check_start(
            run.experiment, run.ranks if ranks_are_known else None, run.ranks_per_node, run.fewest_ranks
        )
    ]
    return list(dict.fromkeys(lines))
