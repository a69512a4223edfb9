"""``resume``: continues unfinished runs from their newest valid checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_train.cli.changes import runs_and_overrides
from hpc_train.cli.code import code_on_resume, is_new
from hpc_train.cli.file_changes import either, say_file_changes
from hpc_train.cli.next_steps import has_saved, new_run_command, next_attempt_words, next_steps
from hpc_train.cli.plan import launcher_problems
from hpc_train.cli.queue_forecast import refuse_never_starting
from hpc_train.cli.run_row import rows_of
from hpc_train.cli.starting import polling, report, start
from hpc_train.cli.version_changes import VersionChange, other_python, version_change
from hpc_train.config.schema import Experiment
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import Launcher, MultiClusterLauncher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import last_launcher, launcher_of, load_launcher, statuses
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.plan.identity import changes_identity
from hpc_train.plan.input_files import DATA
from hpc_train.recovery.budgets import spent_budget
from hpc_train.recovery.history import records
from hpc_train.registry import is_factory
from hpc_train.run.attempts import newest_number
from hpc_train.run.checkpoints import committed
from hpc_train.run.create import (
    inputs_differ,
    note_change,
    note_inputs,
    note_versions,
    noted_changes,
    refused_changes,
)
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs, run_name
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.frozen_experiment import load_changed
from hpc_train.run.liveness import SILENT_LIMIT_S, end_living, lives, living, minutes, newest_record, silent_s
from hpc_train.run.run_status import GOING_ON, RunStatus, read_status
from hpc_train.run.trust import check_run
from hpc_train.run.versions import Differences, in_words
from hpc_train.validate.loading import Loaded
from hpc_train.validate.rules import check_start

_STRICT = "environment.strict=true"
#: Not part of the run's identity: its location and its sweep.
_FIXED: dict[str, Callable[[Experiment], object]] = {
    "name": lambda experiment: experiment.name,
    "sweep.grid": lambda experiment: experiment.sweep.grid,
    "sweep.list": lambda experiment: experiment.sweep.list,
    "sweep.random": lambda experiment: experiment.sweep.random,
    "sweep.exclude": lambda experiment: experiment.sweep.exclude,
    "sweep.search": lambda experiment: experiment.sweep.search,
    # Unlike the rest of its section it changes the mathematics.
    "parallel.sync_batchnorm": lambda experiment: experiment.parallel.sync_batchnorm,
}


@dataclass(frozen=True)
class _Request:
    """The request of the command line for every run."""

    overrides: list[str]
    launcher: str | None
    devices: int | None
    new_code: bool
    strict: bool
    #: Also runs that may be alive on another machine.
    take_over: bool = False


def start_again(
    runs: Sequence[RunPaths], overrides: Sequence[str], launcher: str, devices: int | None
) -> ExitCode:
    """Start runs again: without a checkpoint with the current code, else from it with their own."""
    codes: list[ExitCode] = []
    # Before any starts: a run that has saved something meanwhile is not started a second time.
    saved = [paths for paths in runs if has_saved(paths)]
    unsaved = [paths for paths in runs if paths not in saved]
    for new_code, some in ((True, unsaved), (False, saved)):
        request = _Request(list(overrides), launcher, devices, new_code, strict=False)
        codes += _resume_batch(launcher, some, request) if some else []
    return max(codes)


@dataclass(frozen=True)
class _Resumption:
    """One run to resume, completely checked."""

    paths: RunPaths
    loaded: Loaded
    devices: int | None
    versions: VersionChange
    #: Changes of the previous attempt, which was rejected because of them.
    omitted_changes: list[str]


def resume(
    words: Sequence[str],
    *,
    local: bool,
    devices: int | None,
    as_json: bool,
    launcher: str | None,
    code: str | None = None,
    strict_env: bool = False,
    take_over: bool = False,
) -> ExitCode:
    """Resume the runs: queued ones at once, the others one after the other; return the worst exit code.

    ``strict_env``: refuse, here and on the nodes, if versions differ from the run's earlier ones.
    """
    run_words, overrides = runs_and_overrides(words)
    if not run_words:
        raise UsageError("resume: names no run; give a run id, a run's folder, or an experiment's name")
    overrides += [_STRICT] if strict_env else []
    launcher = LOCAL if local and launcher is None else launcher
    request = _Request(overrides, launcher, devices, is_new(code), strict_env, take_over)
    runs, codes = find_runs(run_words), []
    for name, some in _batches(runs, request):
        codes += _resume_batch(name, some, request)
        if codes[-1] == ExitCode.INTERRUPTED:
            break
    report(rows_of(runs), as_json=as_json)
    return max(codes)


def _batches(runs: Sequence[RunPaths], request: _Request) -> list[tuple[str, list[RunPaths]]]:
    """Return the groups of runs that a launcher starts together: queued ones first, by experiment."""
    queued: dict[tuple[str, ExperimentPaths], list[RunPaths]] = {}
    followed: list[tuple[str, list[RunPaths]]] = []
    for paths in runs:
        name = request.launcher or last_launcher(paths)
        if request.launcher is None and is_factory(name):
            check_run(paths)  # the files of other users must not select the code that is imported here
        if load_launcher(name).is_queue:
            queued.setdefault((name, paths.siblings), []).append(paths)
        else:
            followed.append((name, [paths]))
    if queued and request.devices is not None:
        raise UsageError(
            "--devices: is for this machine; add --local, or change the nodes that the file requests"
        )
    return [*((name, some) for (name, _), some in queued.items()), *followed]


def _resume_batch(name: str, runs: Sequence[RunPaths], request: _Request) -> list[ExitCode]:
    """Resume the runs of one experiment that can be resumed; report why the others can't."""
    launcher, codes = load_launcher(name), list[ExitCode]()
    with launcher.submitting(runs[0].siblings):
        newest, ready = {paths: newest_number(paths) for paths in runs}, []
        for paths, status in zip(runs, statuses(runs, is_fresh=True), strict=True):
            is_made_only = launcher.is_unsubmitted(paths)
            code = _stays(paths, status, is_made_only=is_made_only, take_over=request.take_over)
            codes += [] if code is None else [code]
            ready += [paths] if code is None else []
        prepared = [_prepare(paths, request, name, launcher) for paths in ready]
        refuse_never_starting(launcher, [each.loaded for each in prepared])
        living = {each.paths: None for each in prepared if _outlives(each.paths, request)}
        codes += [_refuse_living(paths, read_status(paths)) for paths in living]
        prepared = [each for each in prepared if each.paths not in living]
        _say_changes(prepared, is_queued=launcher.is_queue)
        _warn_of_divergence([each.paths for each in prepared], request)
        starts = [_start_request(each, request, newest[each.paths]) for each in prepared]
        for each in starts:
            words = next_attempt_words(each.paths, request.overrides)
            say(f"{run_name(each.paths)}: {words}; in {each.paths.folder}")
        if starts:
            codes.append(start(launcher, starts))
    return codes


def _warn_of_divergence(runs: Sequence[RunPaths], request: _Request) -> None:
    """Print the remedy if a run that diverged resumes unchanged: training is deterministic."""
    if request.overrides or request.new_code:
        return
    for paths in runs:
        record = newest_record(paths)
        if record is not None and record.cause == "diverged":
            lines = next_steps(paths, read_status(paths))
            say("\n  ".join([f"{run_name(paths)}: its last attempt diverged ({record.reason})", *lines]))


def _outlives(paths: RunPaths, request: _Request) -> bool:
    """End ranks that outlived their launcher; return True if the attempt may be alive on another machine."""
    record = newest_record(paths)
    is_ours_to_end = record is not None and record.job is None
    return is_ours_to_end and end_living(paths, take_over=request.take_over) is not None


def _start_request(resumption: _Resumption, request: _Request, after: int) -> StartRequest:
    paths, experiment = resumption.paths, resumption.loaded.experiment
    new_code = code_on_resume(paths, experiment, new=request.new_code)

    def prepare(attempt: int) -> None:
        if new_code is not None:
            new_code.apply(attempt)
        if request.overrides:
            # In addition to the overrides recorded for an attempt of this number that never began.
            noted = ((read_json(paths.run) or {}).get("changes") or {}).get(str(attempt)) or []
            note_change(paths, attempt, [*noted, *request.overrides])
        if resumption.versions.now is not None:
            note_versions(paths, attempt, resumption.versions.now)
        note_inputs(paths, experiment, has_saved=bool(committed(paths)))

    problem, devices = resumption.loaded.problem, resumption.devices
    return StartRequest(paths, experiment, problem, devices, prepare, after, polling)


def _stays(paths: RunPaths, status: RunStatus, *, is_made_only: bool, take_over: bool) -> ExitCode | None:
    """Return why the run is not resumed; None if it can be.

    ``take_over``: resume it also if it may be alive on another machine.
    """
    if status.state == "completed":
        say(f"{run_name(paths)}: completed already, in {paths.folder}; nothing to resume")
        return ExitCode.DONE
    if is_made_only:
        return None
    record = newest_record(paths)
    if take_over and record is not None and record.job is None and not living(record):
        return None
    if take_over and _other_cluster(paths) is not None:
        return None
    if status.state in GOING_ON:
        return _refuse_living(paths, status)
    # A failed run's launcher may still be ending, and ranks may outlive theirs. Queues were queried before.
    if record is not None and record.job is None and lives(paths, record) is not False:
        return _refuse_living(paths, status)
    return None


def _say_changes(runs: Sequence[_Resumption], *, is_queued: bool) -> None:
    """Report the overrides of the previous attempt, and changes of files and versions since."""
    for each in runs:
        if each.omitted_changes:
            changes = " ".join(each.omitted_changes)
            say(f"{run_name(each.paths)}: omits {changes}, with which the last attempt was refused")
    say_file_changes([(each.paths, each.loaded.experiment) for each in runs], is_queued=is_queued)
    runs_by_words: dict[str, list[str]] = {}
    for each in runs:
        if words := each.versions.words:
            runs_by_words.setdefault(words, []).append(run_name(each.paths))
    for words, ids in runs_by_words.items():
        say(f"{either(ids)}: {words}")


def _refuse_living(paths: RunPaths, status: RunStatus) -> ExitCode:
    say(f"{run_name(paths)}: {_living_words(paths, status)}; nothing started")
    return ExitCode.FAILED


def _other_cluster(paths: RunPaths) -> str | None:
    launcher = launcher_of(paths)
    return launcher.other_cluster(paths) if isinstance(launcher, MultiClusterLauncher) else None


def _living_words(paths: RunPaths, status: RunStatus) -> str:
    record, state = newest_record(paths), status.state
    launcher = launcher_of(paths)
    if (cluster := _other_cluster(paths)) is not None:
        return (
            f"is {state} on cluster {cluster}: resume or cancel it there; if {cluster} is gone, "
            f"`{_take_over(paths)}` continues it here"
        )
    if launcher.is_queue:
        reason = f" ({status.reason})" if status.reason else ""
        return f"is {state} on {launcher.title}{reason}; `hpc-train cancel {run_name(paths)}` ends it"
    if record is None or record.launcher_process is None:
        return f"is {state} already"
    process = record.launcher_process
    if process.is_alive():
        return f"is {state}, its launcher (process {process.pid} on {process.host}) lives"
    if record.launcher not in {None, LOCAL}:
        return (
            f"is {state} with launcher {record.launcher}, which alone knows whether it lives; end it there, "
            f"then `{_take_over(paths)}`"
        )
    seen = f"last sign of life {minutes(silent_s(paths, record))} ago"
    return (
        f"may still run on {process.host} ({seen}), which can't be seen from here; resume it there, "
        f"or here once it has been silent for {minutes(SILENT_LIMIT_S)}; if that machine or container is "
        f"gone, `{_take_over(paths)}` continues it now"
    )


def _take_over(paths: RunPaths) -> str:
    return f"hpc-train resume {run_name(paths)} --take-over"


def _prepare(paths: RunPaths, request: _Request, name: str, launcher: Launcher) -> _Resumption:
    """Check everything before anything is changed."""
    check_run(paths)
    before, loaded = _changed(paths, request.overrides)
    devices = _devices(paths, request, name)
    devices = launcher.choose_devices(loaded.experiment, devices)
    ranks = launcher.ranks(loaded.experiment, devices)
    problems = [
        loaded.source.render(problem)
        for problem in check_start(
            loaded.experiment, ranks.most, ranks.per_node, ranks.fewest, kept_size(paths)
        )
    ]
    problems += launcher_problems(launcher, loaded)
    if launcher.is_queue and (spent := spent_budget(loaded.experiment, records(paths))) is not None:
        problems.append(loaded.source.render(spent))
    if problems:
        raise BadFileError(problems)
    _refuse_other_inputs(paths, loaded.experiment)
    pythons = other_python(last_launcher(paths), before.experiment), other_python(name, loaded.experiment)
    versions = version_change(paths, *pythons, new_code=request.new_code)
    if versions.differences and loaded.experiment.environment.strict:
        _refuse_versions(paths, versions.differences, request)
    omitted_changes = [override for override in refused_changes(paths) if override not in request.overrides]
    return _Resumption(paths, loaded, devices, versions, omitted_changes)


def _devices(paths: RunPaths, request: _Request, name: str) -> int | None:
    """Return the ``--devices`` of the command line, else of the last attempt by the same launcher."""
    record = newest_record(paths)
    if request.devices is not None or record is None or name != last_launcher(paths):
        return request.devices
    return record.devices


def _refuse_versions(paths: RunPaths, differences: Differences, request: _Request) -> None:
    asked, remedy = "environment.strict: true", "add environment.strict=false"
    if request.strict:
        asked, remedy = "--strict-env", "omit it"
    found = in_words(differences)
    raise UsageError(
        f"{run_name(paths)}: other versions than the run had: {found}; {asked} refuses that: "
        f"resume it where it had those, or {remedy}"
    )


def _refuse_other_inputs(paths: RunPaths, experiment: Experiment) -> None:
    """Raise BadFileError if a run that has saved something would continue on other data."""
    if DATA in inputs_differ(paths, experiment) and committed(paths):
        raise BadFileError(
            f"{DATA}: the files are not those that {paths.folder.name} was trained on so far; put them "
            "back, or submit the file again with --new"
        )


def _changed(paths: RunPaths, overrides: Sequence[str]) -> tuple[Loaded, Loaded]:
    """Return the current and the changed experiment. Raises UsageError if the latter is another run."""
    earlier = noted_changes(paths, newest_number(paths) + 1)
    before = load_changed(paths, earlier)
    if not overrides:
        return before, before
    after = load_changed(paths, [*earlier, *overrides], check_names=True)
    refused = changes_identity(before.experiment, after.experiment)
    refused += [key for key, value in _FIXED.items() if value(before.experiment) != value(after.experiment)]
    if refused:
        raise UsageError(_other_run(paths, refused, overrides))
    return before, after


def _other_run(paths: RunPaths, refused: Sequence[str], overrides: Sequence[str]) -> str:
    """Report how to train with keys that a resume can't change: as a separate run."""
    run = run_name(paths)
    words = f"{', '.join(refused)}: would make {run} another run; start one of its own:\n"
    words += f"  from step 0: `{new_run_command(paths, overrides)}`"
    if has_saved(paths):
        command = new_run_command(paths, [*overrides, f"model.init_from={run}"])
        words += f"\n  from its weights: `{command}`"
    return words
