"""``plan``, and how a plan is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.cli.printing import columns, put, put_json, say
from hpc_train.cli.starting import load_launcher
from hpc_train.config.loading import Loaded, load
from hpc_train.config.rules import check_start
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.launchers.base import QueueingLauncher
from hpc_train.launchers.slurm import LAUNCHER as SLURM
from hpc_train.plan.planning import Plan, PlannedRun, make_plan
from hpc_train.plan.sweep import describe

_HEADS = ("run", "ranks", "micro-batches", "accumulation", "steps an epoch", "steps", "GPU-hours")


def plan(file: Path, overrides: Sequence[str], *, as_json: bool) -> ExitCode:
    """Show what would be started."""
    loaded = load(file, overrides)
    made = make_plan(loaded)
    problems = start_problems(loaded, made)
    scripts: list[str] = []
    if loaded.experiment.slurm is not None and not problems:
        try:
            scripts = _slurm_scripts(loaded, made)
        except BadFileError as error:
            problems += error.problems
    show(made, as_json=as_json, scripts=scripts)
    for line in problems:
        say(line)
    return ExitCode.DONE


def _slurm_scripts(loaded: Loaded, made: Plan) -> list[str]:
    from hpc_train.cli.queueing import batch_scripts

    launcher = load_launcher(SLURM)
    assert isinstance(launcher, QueueingLauncher)
    return batch_scripts(launcher, loaded, made)


def show(made: Plan, *, as_json: bool, scripts: Sequence[str] = ()) -> None:
    """Print the plan, and the batch scripts of its runs, to stdout."""
    if as_json:
        put_json(made.to_json() | {"scripts": list(scripts)})
        return
    is_sweep = any(run.values for run in made.runs)
    heads = [*_HEADS, "with"] if is_sweep else [*_HEADS]
    for line in columns(
        [heads, *([*_cells(run), *([describe(run.values)] * is_sweep)] for run in made.runs)]
    ):
        put(line)
    for script in scripts:
        put("")
        put(script.rstrip("\n"))


def _cells(run: PlannedRun) -> list[str]:
    numbers = (run.ranks, run.micro_batches, run.accumulation, run.steps_per_epoch, run.total_steps)
    return [run.id, *("unknown" if number is None else str(number) for number in numbers), _hours(run)]


def _hours(run: PlannedRun) -> str:
    if run.gpu_hours is None:
        return "unknown"
    return f"at most {run.gpu_hours:g}" if run.gpu_hours else "0"


def start_problems(loaded: Loaded, made: Plan) -> list[str]:
    """Return the lines of what keeps runs of the plan from being started."""
    lines = [
        loaded.problem(problem.path, problem.message, problem.remedy)
        for run in made.runs
        for problem in check_start(run.experiment, run.ranks, run.ranks_per_node, run.fewest_ranks)
    ]
    return list(dict.fromkeys(lines))
