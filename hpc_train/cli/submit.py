"""``submit``: plans a file and starts its runs, all at once in a queue, one after the other elsewhere."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.cli import extending, plan_cost, run_row, starting
from hpc_train.cli.changes import Change, changes_on_resume, either, value_at
from hpc_train.cli.code import say_older_code, snapshot_for
from hpc_train.cli.command_options import SubmitOptions
from hpc_train.cli.parallel_runs import Slots, slot_environment
from hpc_train.cli.plan import say_layouts, show
from hpc_train.cli.preflight import Checked, LauncherChoice, Preflight, never_starting, say_before, to_submit
from hpc_train.cli.resume import start_again
from hpc_train.cli.search import GivenUp, next_trials
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.plan.planning import Plan, PlannedRun
from hpc_train.experiment.plan.staged_file import StagedFile
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import StartRequest, UsesNodes
from hpc_train.launchers.lookup import launcher_of, statuses
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.report.changed_keys import in_words
from hpc_train.run.attempts import newest_number
from hpc_train.run.create import Origin, Surroundings, create_run, effective_experiment, inputs_differ
from hpc_train.run.files import in_parallel, remove_folder, sync_folder
from hpc_train.run.find import is_run, names_of, run_name
from hpc_train.run.run_status import GOING_ON, INTERRUPTED, RunStatus
from hpc_train.run.trust import check_experiment_folder


def submit(options: SubmitOptions, given_up: GivenUp = lambda run_id: False) -> ExitCode:
    """Start the runs of the file and print their status; return ``submit_runs``'s exit code."""
    code, runs = submit_runs(options, given_up)
    if not options.dry_run:
        starting.report(run_row.rows_of(runs), as_json=options.as_json)
    return code


def submit_runs(
    options: SubmitOptions, given_up: GivenUp = lambda run_id: False
) -> tuple[ExitCode, list[RunPaths]]:
    """Start the runs of the file; return the worst exit code of the runs, or DONE once all are queued.

    Also return the runs, except those that were not started after Ctrl-C. ``given_up``: the trials of a
    search that are not started again.
    """
    choice = LauncherChoice.of(options)
    if options.jobs > 1 and not options.local:
        raise UsageError(
            "--jobs: is for this machine; add --local (in a queue sweep.max_parallel is the number of runs "
            "at a time)"
        )
    launcher = choice.launcher
    file = StagedFile(options.file, [*options.overrides, *(["profile=true"] if options.profile else [])])
    if options.jobs > 1 and file.has_stages:
        raise UsageError("--jobs: stages run one after the other; omit it")
    stages = file.load_all()
    first = stages[0]
    folder = ExperimentPaths(runs_root() / first.experiment.name)
    if not options.dry_run and os.path.lexists(folder.folder):
        check_experiment_folder(folder)  # in a shared runs folder it may belong to another user and be closed
    search = next_trials(first, given_up)  # stages have none
    if search is not None and not search.starts:
        if not options.dry_run:
            starting.finish_submissions(launcher, folder)
        return ExitCode.DONE, []
    trials = search.starts if search else None
    chooses = not (options.dry_run and options.devices is not None)  # else they may be missing here
    plans = [
        choice.plan(loaded, options.devices, trials, chooses=chooses, jobs=options.jobs) for loaded in stages
    ]
    checks = [_preflight(choice, *pair, options) for pair in zip(stages, plans, strict=True)]
    problems = [line for checked in checks for line in checked.problems or checked.refused]
    if options.dry_run:
        whole = Plan(plans[0].name, [run for plan in plans for run in plan.runs])
        scripts = [script for checked in checks for script in checked.scripts]
        show(whole, as_json=options.as_json, scripts=scripts)
    if problems:
        raise BadFileError(list(dict.fromkeys(problems)))
    for loaded in stages:
        say_before(choice, loaded)
    if options.dry_run:
        return ExitCode.DONE, []

    again = [trial.run_id for trial in search.again] if search else []
    if not file.has_stages:
        return _Submission(choice, first, plans[0], options, again).start_all()

    def submission(index: int, after: str | None, weights: str | None) -> _Submission:
        loaded = file.load(index, after, weights)  # with --new, a run has another id than planned
        plan = choice.plan(loaded, plans[index].devices)
        return _Submission(choice, loaded, plan, options, [])

    return starting.start_stages(launcher, len(stages), submission)


def _preflight(choice: LauncherChoice, loaded: Loaded, plan: Plan, options: SubmitOptions) -> Checked:
    launcher = choice.launcher
    return Preflight(launcher, on_this_machine=choice.on_this_machine).of_plan(
        loaded,
        plan,
        budget=lambda: plan_cost.over_budget_lines(loaded, plan, choice.name),
        queue=lambda: never_starting(
            launcher, loaded, plan.name, plan.runs if options.new else to_submit(plan)
        ),
    )


class _Submission:
    """The runs of a plan: creates them, then starts them in batches as large as the launcher accepts."""

    def __init__(
        self,
        choice: LauncherChoice,
        loaded: Loaded,
        plan: Plan,
        options: SubmitOptions,
        again: Sequence[str],
    ) -> None:
        self._launcher, self._name, self._loaded, self._plan = choice.launcher, choice.name, loaded, plan
        self._devices, self._options = plan.devices, options
        self.has_weights = isinstance(loaded.experiment, Experiment)
        self._folder = ExperimentPaths(runs_root() / plan.name)
        #: Trials of a search to start again or to resume, by the run's id: each its newest run (``--new``).
        self._again = {name.partition("-")[0]: RunPaths(self._folder.folder / name) for name in again}
        #: Each run's folder, and whether it is new, once created.
        self._folders: list[tuple[RunPaths, bool]] | None = None
        self._snapshot: Path | None = None
        self._surroundings: Surroundings | None = None
        self._slots: Slots | None = None
        self._runs: list[RunPaths] = []
        self._unchanged: dict[RunPaths, Job] = {}
        self._codes = [ExitCode.DONE]

    def start_all(self) -> tuple[ExitCode, list[RunPaths]]:
        """Start all runs; Ctrl-C ends the series. Return the worst exit code, and the runs."""
        if environments := self._slot_environments():
            self._slots = Slots(environments, self._name, self._devices)
            with self._slots.taking_signals():
                self._start_batches()
                self._slots.wait_for_all()
            self._codes += self._slots.codes
        else:
            self._start_batches()
        if self._unchanged:
            say_older_code(self._folder, self._unchanged)
        if missing := len(self._plan.runs) - len(self._runs):
            say(f"{missing} more runs were not started; submit the file again to start them")
        return max(self._codes), self._runs

    def _slot_environments(self) -> list[Mapping[str, str]]:
        """Return the environment of the command of each run that trains at the same time."""
        experiment, jobs = self._loaded.experiment, self._options.jobs
        if jobs > 1:
            assert self._devices is not None, "devices_per_run chose them"
            size = (jobs, self._devices, experiment.device)
            return [slot_environment(os.environ, slot, *size) for slot in range(jobs)]
        if len(self._plan.runs) == 1 or not isinstance(self._launcher, UsesNodes):
            return []
        slots = self._launcher.slots(experiment)[: experiment.sweep.max_parallel]
        return [{**os.environ, **variables} for variables in slots]

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
            for run, (paths, is_new) in zip(batch, self._folders_of(batch), strict=True):
                (new if is_new else existing).append((paths, run))
                self._runs.append(paths)
            if new:
                if len(self._plan.runs) == 1 and not self._options.new:
                    _say_shorter(*new[0])
                self._start_new(new)
        self._handle_existing(existing)

    def create(self) -> RunPaths:
        """Create the plan's only run, unless it exists, before it is started; not for a queue."""
        self._folders = self._folders_of(self._plan.runs)
        return self._folders[0][0]

    def _folders_of(self, runs: Sequence[PlannedRun]) -> list[tuple[RunPaths, bool]]:
        """Create the runs; return the folder of each, and False if it existed."""
        if self._folders is not None:
            return self._folders
        self._take_snapshot()
        folders = []
        paths = [RunPaths(self._folder.folder / run.id) for run in runs]
        created = in_parallel(lambda pair: self._create(*pair), zip(paths, runs, strict=True))
        if any(created):
            sync_folder(self._folder.folder)
        for run, folder, is_new in zip(runs, paths, created, strict=True):
            if is_new:
                folders.append((folder, True))
            elif self._options.new:
                folders.append((self._create_beside(folder, run), True))
            else:
                existing = self._again.get(run.id) or _existing_run(folder, run)
                folders.append((existing, starting.is_created_only(existing, self._launcher, self._name)))
        return folders

    def _take_snapshot(self) -> None:
        """Read the code that all runs share, once, after the leftovers of killed commands are removed."""
        if self._surroundings is None:
            for run in self._plan.runs:
                self._make_free(RunPaths(self._folder.folder / run.id))
            self._snapshot = snapshot_for(self._folder, self._plan.runs, always_new=self._options.new)
            self._surroundings = Surroundings.read(self._snapshot)

    def _create_beside(self, paths: RunPaths, run: PlannedRun) -> RunPaths:
        """Create the run under the first free name of ``<id>-2``, ``<id>-3``, …"""
        for number in itertools.count(2):
            other = RunPaths(paths.folder.with_name(f"{run.id}-{number}"))
            self._make_free(other)
            if self._create(other, run):
                sync_folder(other.folder.parent)
                return other
        raise AssertionError("itertools.count ends")

    def _create(self, paths: RunPaths, run: PlannedRun) -> bool:
        """Create the run's folder; False if it exists."""
        name = self._loaded.source_name  # empty for a dict
        origin = Origin(str(Path(name).absolute()), list(self._loaded.overrides)) if name else None
        return create_run(
            paths,
            run.experiment,
            paths.folder.name,
            run.total_steps,
            launcher=self._name,
            snapshot=self._snapshot,
            surroundings=self._surroundings,
            origin=origin,
            values=run.values,
            layout=run.layout,
            stage=self._loaded.stage,
        )

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
            StartRequest(paths, run.experiment, self._loaded.problem, self._devices, polling=starting.polling)
            for paths, run in runs
        ]
        self._codes.append(starting.start(self._launcher, requests))
        if self._launcher.is_queue:
            say_layouts([run for _, run in runs])

    def _handle_existing(self, runs: Sequence[tuple[RunPaths, PlannedRun]]) -> None:
        """Start runs again that ended before they saved anything, and resume interrupted trials of a search;
        print the status of the others.
        """
        is_queued = self._launcher.is_queue
        #: By the changes of the file that they apply: a queue accepts runs with the same changes at once.
        again: dict[tuple[str, ...], list[RunPaths]] = {}
        active: list[tuple[RunPaths, PlannedRun]] = []
        for (paths, run), status in zip(runs, statuses([paths for paths, _ in runs]), strict=True):
            is_again = starting.starts_again(paths, status)
            if is_again:
                reason = f" ({status.reason})" if status.reason else ""
                say(
                    f"{run_name(paths)}: {status.state}{reason} before it saved anything; "
                    "starts again with the current code and file"
                )
            # A search's trial continues from its checkpoint if the search was stopped.
            is_interrupted = run.id in self._again and status.state == INTERRUPTED
            if is_again or (is_interrupted and not inputs_differ(paths, run.experiment)):
                changes = tuple(_overrides_since(paths, run.experiment, is_queued=is_queued))
                again.setdefault(changes, []).append(paths)
                continue
            self._codes.append(_say_existing(paths, status, run.experiment, is_queued=is_queued))
            self._unchanged[paths] = run.experiment
            if status.state in GOING_ON and not inputs_differ(paths, run.experiment):
                active.append((paths, run))
        self._say_not_applied(active)
        for changes, group in again.items():
            if self._slots is not None:
                self._slots.start(group[0], changes)
            else:
                self._codes.append(
                    start_again(group, changes, self._name, self._devices, self._options.nodes)
                )

    def _say_not_applied(self, active: Sequence[tuple[RunPaths, PlannedRun]]) -> None:
        """Print what the file changes in active runs, whether the queue accepts it, and how to apply it."""
        groups: dict[tuple[str, ...], list[tuple[RunPaths, PlannedRun]]] = {}
        overrides_of: dict[tuple[str, ...], list[str]] = {}
        for paths, run in active:
            changes = _changes_since(paths, run.experiment, is_queued=launcher_of(paths).is_queue)
            lines = tuple(change.words for change in changes)
            groups.setdefault(lines, []).append((paths, run))
            overrides_of.setdefault(lines, [change.override for change in changes])
        for lines, group in groups.items():
            runs = [paths for paths, _ in group]
            if not lines:
                continue
            say(f"{either([run_name(paths) for paths in runs])}: the file has changed since:")
            say(*(f"  {line}" for line in lines))
            if refused := never_starting(self._launcher, self._loaded, self._plan.name, [group[0][1]]):
                say("  but the queue would not start it:", *(f"    {line}" for line in refused))
                self._codes.append(ExitCode.BAD_FILE)
                continue
            names = names_of(runs)
            cancel = shlex.join(["hpc-train", "cancel", *names])
            resume = shlex.join(["hpc-train", "resume", *names, *overrides_of[lines]])
            say(f"  the changes are valid; to apply them: `{cancel} && {resume}`")


def _say_shorter(paths: RunPaths, run: PlannedRun) -> None:
    """Print how to continue a completed run that is only shorter than this new one."""
    if (shorter := extending.shorter_run(paths, run.experiment)) is not None:
        other, length = shorter
        command = shlex.join(["hpc-train", "resume", run_name(other), length])
        say(
            f"{run_name(other)}: has completed the same experiment with a shorter length; "
            f"`{command}` trains it longer"
        )


def _existing_run(paths: RunPaths, run: PlannedRun) -> RunPaths:
    """Return the run of this id whose data files are the current ones; ``paths`` if there is none."""
    beside = (RunPaths(paths.folder.with_name(f"{run.id}-{number}")) for number in itertools.count(2))
    for existing in itertools.chain([paths], itertools.takewhile(is_run, beside)):
        if not inputs_differ(existing, run.experiment):
            return existing
    return paths


def _say_existing(paths: RunPaths, status: RunStatus, wanted: Job, *, is_queued: bool) -> ExitCode:
    run_id = run_name(paths)
    if others := inputs_differ(paths, wanted):
        differing = " and ".join(
            f"{key} ({value_at(wanted.model_dump(mode='json'), tuple(key.split('.')))})" for key in others
        )
        say(
            f"{run_id}: {status.state}, in {paths.folder}, but of other files than {differing} has now; "
            "nothing started: restore the files, or train on the new ones in a new run with --new"
        )
        return ExitCode.FAILED
    if status.state == "completed":
        longer = f", `{command}` longer" if (command := extending.longer_command(paths)) else ""
        say(
            f"{run_id}: completed already, in {paths.folder}; nothing started (--new trains it again{longer})"
        )
        return ExitCode.DONE
    reason = f" ({status.reason})" if status.reason else ""
    if status.state in GOING_ON:
        local = (
            "" if is_queued or status.state != "pending" else " (--new starts another one on this machine)"
        )
        say(f"{run_id}: {status.state} already{reason}, in {paths.folder}; nothing started{local}")
        return ExitCode.DONE
    say(f"{run_id}: {status.state}{reason} at step {status.step}, in {paths.folder}; nothing started")
    for line in starting.next_steps(paths, status, _overrides_since(paths, wanted, is_queued=is_queued)):
        say(f"  {line}")
    say("  or train it again from step 0 in a new run: add --new")
    return ExitCode.FAILED


def _overrides_since(paths: RunPaths, wanted: Job, *, is_queued: bool) -> list[str]:
    return [change.override for change in _changes_since(paths, wanted, is_queued=is_queued)]


def _changes_since(paths: RunPaths, wanted: Job, *, is_queued: bool) -> list[Change]:
    """Return the keys that the file has changed since and that a resume may change."""
    try:
        frozen = effective_experiment(paths, newest_number(paths) + 1)
    except BadFileError:
        return []  # the frozen file is broken; resume reports how
    return changes_on_resume(frozen, wanted, is_queued=is_queued)
