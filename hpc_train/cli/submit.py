"""``submit``: plans a file and starts its runs, all at once in a queue, one after the other elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.code import say_older_code, snapshot_for
from hpc_train.cli.creating import (
    SubmitContext,
    changes_since,
    create_all,
    create_beside,
    existing_run,
    say_existing,
    say_starts_again,
    starts_again,
)
from hpc_train.cli.found_sizes import say_layouts
from hpc_train.cli.parallel_runs import Slots, devices_per_run
from hpc_train.cli.plan import (
    LauncherOptions,
    batch_scripts,
    launcher_problems,
    missing_data,
    say_remarks,
    show,
    start_problems,
    wrong_layout,
)
from hpc_train.cli.plan_cost import over_budget_lines
from hpc_train.cli.queue_forecast import never_starting
from hpc_train.cli.resume import start_again
from hpc_train.cli.run_row import rows_of
from hpc_train.cli.searching import GivenUp, finish_submissions, next_trials
from hpc_train.cli.starting import polling, report, start
from hpc_train.config.schema import Experiment
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.lookup import statuses
from hpc_train.loggers.wandb_key import effective_mode, has_key, needs_key
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.plan.planning import Plan, PlannedRun
from hpc_train.report.changed_keys import in_words
from hpc_train.run.create import Surroundings, inputs_differ
from hpc_train.run.files import remove_folder
from hpc_train.run.find import run_name
from hpc_train.run.run_status import INTERRUPTED, RunStatus
from hpc_train.run.trust import check_experiment_folder
from hpc_train.validate.loading import Loaded, load


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(LauncherOptions):
    """The options of ``submit``."""

    dry_run: bool = False
    new: bool = False
    as_json: bool = False
    #: Number of concurrent runs on this machine.
    jobs: int = 1


def submit(
    file: Path,
    overrides: Sequence[str],
    options: SubmitOptions,
    given_up: GivenUp = lambda run_id: False,
) -> ExitCode:
    """Start the runs of the file; return the worst exit code of the runs, or DONE once all are queued.

    ``given_up``: the trials of a search that are not started again.
    """
    launcher = options.load()
    if options.jobs > 1 and not options.local:
        raise UsageError(
            "--jobs: is for this machine; add --local (in a queue sweep.max_parallel is the number of runs "
            "at a time)"
        )
    loaded = load(file, overrides)
    folder = ExperimentPaths(runs_root() / loaded.experiment.name)
    if not options.dry_run and os.path.lexists(folder.folder):
        check_experiment_folder(folder)  # in a shared runs folder it may belong to another user and be closed
    devices = _devices(launcher, loaded, options)
    search = next_trials(loaded, given_up)
    if search is not None and not search.starts:
        if not options.dry_run:
            finish_submissions(launcher, loaded)
        report([], as_json=options.as_json)
        return ExitCode.DONE
    plan = options.plan(launcher, loaded, devices, search.starts if search else None)
    problems = start_problems(loaded, plan) + launcher_problems(launcher, loaded)
    problems += wrong_layout(loaded, is_queued=launcher.is_queue)
    if options.on_this_machine:
        problems += missing_data(loaded)
    scripts: list[str] = []
    if not problems:
        try:
            scripts = batch_scripts(launcher, loaded, plan)
        except BadFileError as error:
            problems += error.problems
    if not problems:
        problems += over_budget_lines(loaded, plan, options.name)
        problems = problems or never_starting(launcher, loaded, plan, new=options.new)
    if options.dry_run:
        show(plan, as_json=options.as_json, scripts=scripts)
    if problems:
        raise BadFileError(problems)
    if launcher.is_queue:
        for line in missing_data(loaded, "make sure that the nodes have it; submitting nevertheless"):
            say(line)
    say_remarks(loaded)
    _say_no_key(loaded)
    if options.dry_run:
        return ExitCode.DONE
    again = [trial.run_id for trial in search.again] if search else []
    return _Submission(launcher, loaded, plan, devices, options, again).start_all()


def _devices(launcher: Launcher, loaded: Loaded, options: SubmitOptions) -> int | None:
    """Return the number of ranks of each run on this machine; None if the launcher decides."""
    devices = options.devices
    if options.dry_run and devices is not None:
        return devices
    if options.jobs > 1:
        devices = devices_per_run(devices, options.jobs, loaded.experiment.device)
    return launcher.choose_devices(loaded.experiment, devices)


def _say_no_key(loaded: Loaded) -> None:
    """Warn if wandb has no API key; ranks have this command's environment."""
    wandb = loaded.experiment.logging.wandb
    if wandb is None or not needs_key(wandb.mode) or has_key():
        return
    outcome = (
        "runs log into their folders"
        if effective_mode(wandb.mode) == "offline"
        else "wandb gets nothing of the runs"
    )
    remedy = "set WANDB_API_KEY or run `wandb login` before they start, or write mode: offline"
    say(
        loaded.problem(
            "logging.wandb.mode", f"there is no API key, so {outcome}", remedy, "logging.wandb-key"
        )
    )


class _Submission:
    """The runs of a plan: creates them, then starts them in batches as large as the launcher accepts."""

    def __init__(
        self,
        launcher: Launcher,
        loaded: Loaded,
        plan: Plan,
        devices: int | None,
        options: SubmitOptions,
        again: Sequence[str],
    ) -> None:
        self._launcher, self._loaded, self._plan = launcher, loaded, plan
        self._devices, self._options = devices, options
        self._folder = ExperimentPaths(runs_root() / plan.name)
        #: Trials of a search to start again or to resume, by the run's id: each its newest run (``--new``).
        self._again = {name.partition("-")[0]: RunPaths(self._folder.folder / name) for name in again}
        self._context: SubmitContext | None = None
        self._slots: Slots | None = None
        self._runs: list[RunPaths] = []
        #: Existing runs that remain unchanged.
        self._left: dict[RunPaths, Experiment] = {}
        self._codes = [ExitCode.DONE]

    def start_all(self) -> ExitCode:
        """Start all runs; Ctrl-C ends the series. Return the worst exit code."""
        if self._options.jobs > 1:
            assert self._devices is not None, "devices_per_run chose them"
            device = self._loaded.experiment.device
            self._slots = Slots(self._options.jobs, self._options.name, self._devices, device)
            with self._slots.taking_signals():
                self._start_batches()
                self._slots.wait_for_all()
            self._codes += self._slots.codes
        else:
            self._start_batches()
        if self._left:
            say_older_code(self._folder, self._left)
        if left := len(self._plan.runs) - len(self._runs):
            say(f"{left} more runs were not started; submit the file again to start them")
        report(rows_of(self._runs), as_json=self._options.as_json)
        return max(self._codes)

    def _start_batches(self) -> None:
        runs = self._plan.runs
        batches = [runs] if self._launcher.is_queue else [[run] for run in runs]
        for number, batch in enumerate(batches, start=1):
            if self._slots is not None:
                self._slots.wait_for_slot()
                if self._slots.is_stopped:
                    return
            if len(batches) > 1:
                values = in_words(batch[0].values)
                say(f"run {number} of {len(batches)}: {batch[0].id}  {values}".rstrip())
            self._start_batch(batch)
            if self._codes[-1] == ExitCode.INTERRUPTED:
                return

    def _start_batch(self, batch: Sequence[PlannedRun]) -> None:
        new: list[tuple[RunPaths, PlannedRun]] = []
        existing: list[tuple[RunPaths, PlannedRun]] = []
        with self._launcher.submitting(self._folder):
            context = self._submit_context()
            for run, (own, is_new) in zip(batch, create_all(self._folder, batch, context), strict=True):
                if not is_new and not self._options.new:
                    existing.append((self._again.get(run.id) or existing_run(own, run), run))
                    self._runs.append(existing[-1][0])
                    continue
                paths = own if is_new else create_beside(own, run, context, self._make_free)
                new.append((paths, run))
                self._runs.append(paths)
            if new:
                self._start_new(new)
        self._handle_existing(existing)

    def _submit_context(self) -> SubmitContext:
        """Return the facts that all runs share; the first time a snapshot of the code is taken."""
        if self._context is None:
            for run in self._plan.runs:
                self._make_free(RunPaths(self._folder.folder / run.id))
            snapshot = snapshot_for(self._folder, self._plan.runs, always_new=self._options.new)
            surroundings = Surroundings.read(snapshot)
            name = self._options.name
            self._context = SubmitContext(self._loaded, name, snapshot, surroundings)
        return self._context

    def _make_free(self, paths: RunPaths) -> None:
        """Remove a run that was only created: its submitter died before it requested a start."""
        if paths.run.is_file() and self._launcher.is_unsubmitted(paths):
            remove_folder(paths.folder)

    def _start_new(self, runs: Sequence[tuple[RunPaths, PlannedRun]]) -> None:
        if not self._launcher.is_queue:
            say(f"{run_name(runs[0][0])}: starting in {runs[0][0].folder}")
            say_layouts([run for _, run in runs])
        if self._slots is not None:
            self._slots.start(runs[0][0])
            return
        requests = [
            StartRequest(paths, run.experiment, self._loaded.problem, self._devices, polling=polling)
            for paths, run in runs
        ]
        self._codes.append(start(self._launcher, requests))
        if self._launcher.is_queue:
            say_layouts([run for _, run in runs])

    def _handle_existing(self, runs: Sequence[tuple[RunPaths, PlannedRun]]) -> None:
        """Start runs again that ended before they saved anything, and resume interrupted trials of a search;
        print the status of the others.
        """
        is_queued = self._launcher.is_queue
        #: By the changes of the file that they apply: a queue accepts runs with the same changes at once.
        again: dict[tuple[str, ...], list[RunPaths]] = {}
        for (paths, run), status in zip(runs, statuses([paths for paths, _ in runs]), strict=True):
            is_again = starts_again(paths, status)
            if is_again:
                say_starts_again(paths, status)
            if is_again or self._resumes(paths, run, status):
                changes = tuple(changes_since(paths, run.experiment, is_queued=is_queued))
                again.setdefault(changes, []).append(paths)
            else:
                self._codes.append(say_existing(paths, status, run.experiment, is_queued=is_queued))
                self._left[paths] = run.experiment
        for changes, some in again.items():
            if self._slots is not None:
                self._slots.start(some[0], changes)
            else:
                self._codes.append(start_again(some, changes, self._options.name, self._devices))

    def _resumes(self, paths: RunPaths, run: PlannedRun, status: RunStatus) -> bool:
        """Return True if a search's trial continues from its checkpoint, because the search was stopped."""
        is_interrupted = run.id in self._again and status.state == INTERRUPTED
        return is_interrupted and not inputs_differ(paths, run.experiment)
