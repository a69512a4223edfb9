"""``submit``: plans a file and starts its runs, one after the other on this machine."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.changes import changes_on_resume
from hpc_train.cli.plan import show, start_problems
from hpc_train.cli.printing import say
from hpc_train.cli.starting import LOCAL, choose_devices, load_launcher, report, say_end, start_attempt
from hpc_train.cli.status import RunRow
from hpc_train.config.loading import Loaded, load
from hpc_train.config.schema import Experiment
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.paths import RunPaths, runs_root
from hpc_train.plan.planning import PlannedRun, make_plan
from hpc_train.run_folder.attempts import newest_number
from hpc_train.run_folder.creation import create_run, effective_experiment
from hpc_train.run_folder.status import GOING_ON, current_status

_LATER = "submitting to Slurm comes with a later version; add --local, or --dry-run"


@dataclass(frozen=True)
class Choices:
    """The options of ``submit``."""

    local: bool = False
    devices: int | None = None
    dry_run: bool = False
    new: bool = False
    as_json: bool = False
    launcher: str | None = None

    @property
    def launcher_name(self) -> str:
        return self.launcher or LOCAL

    @property
    def on_this_machine(self) -> bool:
        return self.local or self.launcher == LOCAL or self.devices is not None


def submit(file: Path, overrides: Sequence[str], choices: Choices) -> ExitCode:
    """Start what the file plans; return how the worst run ended."""
    _check(choices)
    loaded = load(file, overrides)
    devices = choices.devices
    if choices.on_this_machine and (devices is None or not choices.dry_run):
        devices = choose_devices(choices.launcher_name, loaded.experiment, devices)
    plan = make_plan(loaded, devices, choices.on_this_machine)
    problems = start_problems(loaded, plan)
    if choices.on_this_machine:
        problems += _missing_data(loaded)
    if choices.dry_run:
        show(plan, as_json=choices.as_json)
    if problems:
        raise BadFileError(problems)
    if choices.dry_run:
        return ExitCode.DONE
    load_launcher(choices.launcher_name)
    return _start_all(plan.name, plan.runs, devices, choices)


def _missing_data(loaded: Loaded) -> list[str]:
    """Return the line that tells of data that are not here; ranks would find out only after their imports."""
    root = loaded.experiment.data.root
    if root is None or Path(root).expanduser().exists():
        return []
    remedy = "write the folder of the data, or fetch them with `hpc-train prepare FILE`"
    return [loaded.problem("data.root", f"there is no {root} here", remedy)]


def _check(choices: Choices) -> None:
    if choices.devices is not None and not choices.local and choices.launcher is None:
        raise UsageError("--devices: is for this machine; add --local")
    if not choices.local and choices.launcher is None and not choices.dry_run:
        raise UsageError(_LATER)


def _start_all(name: str, runs: Sequence[PlannedRun], devices: int | None, choices: Choices) -> ExitCode:
    """Start one run after the other; Ctrl-C ends the row."""
    codes, begun = [], []
    for run in runs:
        paths, code = _start(name, run, devices, choices)
        begun.append(paths)
        codes.append(code)
        if code == ExitCode.INTERRUPTED:
            break
    if left := len(runs) - len(begun):
        say(f"{left} more runs were not started; submit the file again to start them")
    report([RunRow.of(paths) for paths in begun], as_json=choices.as_json)
    return max(codes)


def _start(name: str, run: PlannedRun, devices: int | None, choices: Choices) -> tuple[RunPaths, ExitCode]:
    paths = RunPaths(runs_root() / name / run.id)
    is_new = _create(paths, run, choices.launcher_name)
    if not is_new and not choices.new:
        return paths, _say_existing(paths, run.experiment)
    if not is_new:
        paths = _create_beside(paths, run, choices.launcher_name)
    say(f"{paths.folder.name}: starting in {paths.folder}")
    code = start_attempt(paths, choices.launcher_name, devices)
    say_end(paths, code)
    return paths, code


def _create(paths: RunPaths, run: PlannedRun, launcher: str) -> bool:
    return create_run(paths, run.experiment, paths.folder.name, run.total_steps, launcher=launcher)


def _create_beside(paths: RunPaths, run: PlannedRun, launcher: str) -> RunPaths:
    """Create the run under the first free one of ``<id>-2``, ``<id>-3``, …"""
    for number in itertools.count(2):
        other = RunPaths(paths.folder.with_name(f"{run.id}-{number}"))
        if _create(other, run, launcher):
            return other
    raise AssertionError("itertools.count ends")


def _say_existing(paths: RunPaths, wanted: Experiment) -> ExitCode:
    """Say how the run that is there already stands, and what can be done to have it as ``wanted``."""
    status, run_id = current_status(paths), paths.folder.name
    if status.state == "completed":
        say(f"{run_id}: completed already, in {paths.folder}; nothing started (--new trains it again)")
        return ExitCode.DONE
    if status.state in GOING_ON:
        say(f"{run_id}: {status.state} already, in {paths.folder}; nothing started")
        return ExitCode.DONE
    reason = f" ({status.reason})" if status.reason else ""
    command = shlex.join(["hpc-train", "resume", run_id, *_changes(paths, wanted)])
    say(
        f"{run_id}: {status.state}{reason}, in {paths.folder}; go on with `{command}`, "
        "or begin again beside it with --new"
    )
    return ExitCode.FAILED


def _changes(paths: RunPaths, wanted: Experiment) -> list[str]:
    """Return what a resume must be told, because the file says it otherwise by now."""
    try:
        return changes_on_resume(effective_experiment(paths, newest_number(paths)), wanted)
    except BadFileError:
        return []  # the frozen file is broken; resume tells how
