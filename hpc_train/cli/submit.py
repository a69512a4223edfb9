"""``submit``: plans a file and starts its runs, one after the other here, or all at once in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.changed_keys import in_words
from hpc_train.cli.code import snapshot_for
from hpc_train.cli.creating import (
    Birth,
    changes_since,
    create,
    create_beside,
    existing_run,
    say_existing,
    say_starts_again,
    starts_again,
)
from hpc_train.cli.micro_batch import say_layouts
from hpc_train.cli.parallel_runs import Slots, devices_per_run
from hpc_train.cli.plan import DEVICES_WITHOUT_LOCAL, FETCH_DATA, missing_data, show, start_problems
from hpc_train.cli.printing import say
from hpc_train.cli.queueing import Queue, batch_scripts, section_problems, submit_all
from hpc_train.cli.resume import queue_again, start_again
from hpc_train.cli.standing import standing, standings
from hpc_train.cli.starting import LOCAL, choose_devices, load_launcher, report, say_end, start_attempt
from hpc_train.cli.status import rows_of
from hpc_train.config.loading import Loaded, load
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import QueueingLauncher
from hpc_train.launchers.slurm import LAUNCHER as SLURM
from hpc_train.loggers.wandb_key import has_key
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.plan.planning import PlannedRun, make_plan
from hpc_train.run_folder.finding import run_name


@dataclass(frozen=True)
class Choices:
    """The options of ``submit``."""

    local: bool = False
    devices: int | None = None
    dry_run: bool = False
    new: bool = False
    as_json: bool = False
    launcher: str | None = None
    #: Runs that this machine trains at a time.
    jobs: int = 1

    @property
    def launcher_name(self) -> str:
        return self.launcher or (LOCAL if self.local else SLURM)

    @property
    def on_this_machine(self) -> bool:
        return self.local or self.launcher == LOCAL or self.devices is not None


def submit(file: Path, overrides: Sequence[str], choices: Choices) -> ExitCode:
    """Start what the file plans; return how the worst run ended, or DONE once all are queued."""
    _check(choices)
    loaded = load(file, overrides)
    launcher = load_launcher(choices.launcher_name)
    if isinstance(launcher, QueueingLauncher):
        return _submit_to(Queue(choices.launcher_name, launcher), loaded, choices)
    devices = choices.devices
    if choices.on_this_machine and (devices is None or not choices.dry_run):
        if choices.jobs > 1:
            devices = devices_per_run(devices, choices.jobs, loaded.experiment.device)
        devices = choose_devices(choices.launcher_name, loaded.experiment, devices)
    plan = make_plan(loaded, devices, choices.on_this_machine)
    problems = start_problems(loaded, plan)
    if choices.on_this_machine:
        problems += missing_data(loaded, FETCH_DATA)
    if choices.dry_run:
        show(plan, as_json=choices.as_json)
    if problems:
        raise BadFileError(problems)
    _say_no_key(loaded)
    if choices.dry_run:
        return ExitCode.DONE
    return _start_all(loaded, plan.runs, devices, choices)


def _submit_to(queue: Queue, loaded: Loaded, choices: Choices) -> ExitCode:
    """Check all, then put the runs into the queue; with ``--dry-run`` show what would be sent."""
    if choices.on_this_machine:
        option = "--local" if choices.local else "--devices"
        raise UsageError(
            f"{option}: is for this machine, launcher {queue.name} is not; leave one of them out"
        )
    plan = make_plan(loaded)
    problems = start_problems(loaded, plan) + section_problems(queue.name, loaded)
    scripts: list[str] = []
    if not problems:
        try:
            scripts = batch_scripts(queue.launcher, loaded, plan)
        except BadFileError as error:
            problems += error.problems
    if choices.dry_run:
        show(plan, as_json=choices.as_json, scripts=scripts)
    if problems:
        raise BadFileError(problems)
    for line in missing_data(loaded, "see that the nodes have it; goes on"):
        say(line)
    _say_no_key(loaded)
    if choices.dry_run:
        return ExitCode.DONE
    submitted = submit_all(queue, loaded, plan, new=choices.new)
    code = max(submitted.code, _handle_existing(queue, submitted.existing))
    report(rows_of(submitted.runs), as_json=choices.as_json)
    return code


def _handle_existing(queue: Queue, runs: Sequence[tuple[RunPaths, PlannedRun]]) -> ExitCode:
    """Queue those again that ended before they saved anything; say how the others stand."""
    codes = [ExitCode.DONE]
    #: By the changes of the file that they take: one array each.
    again: dict[tuple[str, ...], list[RunPaths]] = {}
    for (paths, run), status in zip(runs, standings([paths for paths, _ in runs]), strict=True):
        if starts_again(paths, status):
            say_starts_again(paths, status)
            changes = tuple(changes_since(paths, run.experiment, is_queued=True))
            again.setdefault(changes, []).append(paths)
        else:
            codes.append(say_existing(paths, status, run.experiment, is_queued=True))
    for changes, some in again.items():
        codes.append(queue_again(queue, some[0].siblings, some, changes))
    return max(codes)


def _say_no_key(loaded: Loaded) -> None:
    """Say what wandb without an API key means for the runs; ranks have what this command has."""
    wandb = loaded.experiment.logging.wandb
    if wandb is None or wandb.mode == "offline" or has_key():
        return
    outcome = "runs log into their folders" if wandb.mode == "auto" else "wandb gets nothing of the runs"
    remedy = "set WANDB_API_KEY or run `wandb login` before they start, or write mode: offline"
    say(loaded.problem("logging.wandb.mode", f"there is no API key, so {outcome}", remedy))


def _check(choices: Choices) -> None:
    if choices.devices is not None and not choices.local and choices.launcher is None:
        raise UsageError(DEVICES_WITHOUT_LOCAL)
    if choices.jobs > 1 and not choices.local:
        raise UsageError(
            "--jobs: is for this machine; add --local (on Slurm sweep.max_parallel is the number of runs "
            "at a time)"
        )


def _start_all(loaded: Loaded, runs: Sequence[PlannedRun], devices: int | None, choices: Choices) -> ExitCode:
    """Start one run after the other; Ctrl-C ends the row."""
    folder = ExperimentPaths(runs_root() / loaded.experiment.name)
    birth = Birth(loaded, choices.launcher_name, snapshot_for(folder, runs, anew=choices.new))
    if choices.jobs > 1:
        assert devices is not None, "devices_per_run chose them"
        begun, codes = _start_in_slots(runs, devices, choices, birth)
    else:
        begun, codes = _start_in_turn(runs, devices, choices, birth)
    if left := len(runs) - len(begun):
        say(f"{left} more runs were not started; submit the file again to start them")
    report(rows_of(begun), as_json=choices.as_json)
    return max(codes)


def _start_in_turn(
    runs: Sequence[PlannedRun], devices: int | None, choices: Choices, birth: Birth
) -> tuple[list[RunPaths], list[ExitCode]]:
    codes, begun = [], []
    for number, run in enumerate(runs, start=1):
        _say_number(number, runs)
        paths, code = _start(run, devices, choices, birth)
        begun.append(paths)
        codes.append(code)
        if code == ExitCode.INTERRUPTED:
            break
    return begun, codes


def _start_in_slots(
    runs: Sequence[PlannedRun], devices: int, choices: Choices, birth: Birth
) -> tuple[list[RunPaths], list[ExitCode]]:
    """Train ``choices.jobs`` runs at a time; a stop signal stops all of them and starts no more."""
    slots = Slots(choices.jobs, choices.launcher_name, devices, runs[0].experiment.device)
    codes, begun = [], []
    with slots.taking_signals():
        for number, run in enumerate(runs, start=1):
            slots.wait_for_slot()
            if slots.is_stopped:
                break
            _say_number(number, runs)
            paths, code = _start_in_slot(run, slots, choices, birth)
            begun.append(paths)
            codes += [] if code is None else [code]
        slots.wait_for_all()
    return begun, codes + slots.codes


def _start_in_slot(
    run: PlannedRun, slots: Slots, choices: Choices, birth: Birth
) -> tuple[RunPaths, ExitCode | None]:
    paths = RunPaths(runs_root() / run.experiment.name / run.id)
    is_new = create(paths, run, birth)
    if not is_new and not choices.new:
        status = standing(paths)
        if not starts_again(paths, status):
            return paths, say_existing(paths, status, run.experiment)
        say_starts_again(paths, status)
        slots.start(paths, changes_since(paths, run.experiment, is_queued=False))
        return paths, None
    if not is_new:
        paths = create_beside(paths, run, birth)
    _say_start(paths, run)
    slots.start(paths)
    return paths, None


def _say_number(number: int, runs: Sequence[PlannedRun]) -> None:
    """Say which of a sweep's runs comes now, and its values."""
    if len(runs) > 1:
        run = runs[number - 1]
        say(f"run {number} of {len(runs)}: {run.id}  {in_words(run.values)}".rstrip())


def _say_start(paths: RunPaths, run: PlannedRun) -> None:
    say(f"{run_name(paths)}: starting in {paths.folder}")
    say_layouts([run])


def _start(run: PlannedRun, devices: int | None, choices: Choices, birth: Birth) -> tuple[RunPaths, ExitCode]:
    paths = RunPaths(runs_root() / run.experiment.name / run.id)
    is_new = create(paths, run, birth)
    if not is_new and not choices.new:
        paths = existing_run(paths, run)
        return paths, _existing(paths, run, devices, choices)
    if not is_new:
        paths = create_beside(paths, run, birth)
    _say_start(paths, run)
    code = start_attempt(paths, choices.launcher_name, devices)
    say_end(paths, code)
    return paths, code


def _existing(paths: RunPaths, run: PlannedRun, devices: int | None, choices: Choices) -> ExitCode:
    status = standing(paths)
    if not starts_again(paths, status):
        return say_existing(paths, status, run.experiment)
    say_starts_again(paths, status)
    changes = changes_since(paths, run.experiment, is_queued=False)
    return start_again(paths, changes, choices.launcher_name, devices)
