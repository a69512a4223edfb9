"""``resume``: continues unfinished runs from their newest valid checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_train.cli import changes, run_row, starting
from hpc_train.cli.code import code_on_resume, is_new
from hpc_train.cli.command_options import ResumeOptions
from hpc_train.cli.extending import extending, longer_command
from hpc_train.cli.preflight import Candidate, Preflight, allocation_of, refuse_never_starting, use_nodes
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.experiment.config.keys import node_at
from hpc_train.experiment.plan.input_files import DATA
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import Launcher, MultiClusterLauncher, StartRequest, UsesNodes
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import last_launcher, launcher_of, load_launcher, next_launcher, statuses
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.recovery.budgets import spent_budget
from hpc_train.recovery.history import records
from hpc_train.registry import is_factory
from hpc_train.run import attempts, create, frozen_experiment, stage_order, trust
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs, run_name
from hpc_train.run.liveness import SILENT_LIMIT_S, end_living, lives, living, minutes, newest_record, silent_s
from hpc_train.run.run_status import CANCELLED, GOING_ON, RunStatus, extended_run, extensions, read_status
from hpc_train.run.versions import Differences, in_words

_STRICT = "environment.strict=true"


@dataclass(frozen=True)
class _Request:
    overrides: list[str]
    launcher: str | None
    devices: int | None
    new_code: bool
    strict: bool = False
    #: Also runs that may be alive on another machine.
    take_over: bool = False
    #: ``--nodes``, for an allocation.
    nodes: int | None = None
    #: Filled with the printed lines on runs that may be alive.
    refused: list[str] = field(default_factory=list)


def start_again(
    runs: Sequence[RunPaths],
    overrides: Sequence[str],
    launcher: str,
    devices: int | None,
    nodes: int | None = None,
) -> ExitCode:
    """Start runs again: without a checkpoint with the current code, else from it with their own."""
    codes: list[ExitCode] = []
    # Before any starts: a run that has saved something meanwhile is not started a second time.
    saved = [paths for paths in runs if starting.has_saved(paths)]
    unsaved = [paths for paths in runs if paths not in saved]
    for new_code, group in ((True, unsaved), (False, saved)):
        request = _Request(list(overrides), launcher, devices, new_code, nodes=nodes)
        before = [read_status(paths).state for paths in group]
        codes += _resume_batch(launcher, group, request) if group else []
        codes += _follow(group, before, request)
    return max(codes)


def _follow(runs: Sequence[RunPaths], before: Sequence[str], request: _Request) -> list[ExitCode]:
    """Start the stages after runs that were resumed: a waiting job is replaced, since it waits for a job that
    has ended. Elsewhere than in a queue they start once the former one has completed.

    ``before``: the runs' states before; a cancelled stage follows only a run that was cancelled, too.
    """
    request, codes = replace(request, overrides=[]), list[ExitCode]()
    for run, state in zip(runs, before, strict=True):
        later = [] if state in {*GOING_ON, "completed"} else stage_order.later(run)
        if not later or statuses([run])[0].state not in {*GOING_ON, "completed"}:
            continue
        for paths in later:
            name, is_cancelled = (
                request.launcher or last_launcher(paths),
                read_status(paths).state == CANCELLED,
            )
            if is_cancelled and state != CANCELLED:
                break
            if not load_launcher(name).is_queue and stage_order.waiting_words(paths) is not None:
                break
            if not is_cancelled:
                launcher_of(paths).cancel([paths])
            codes += _resume_batch(name, [paths], request)
    return codes


@dataclass(frozen=True)
class _Resumption:
    paths: RunPaths
    loaded: Loaded
    devices: int | None
    versions: changes.VersionChange
    #: Changes of the previous attempt, which was rejected because of them.
    omitted_changes: list[str]


def resume(options: ResumeOptions) -> ExitCode:
    """Resume the runs and print their status; return ``resume_runs``'s worst exit code."""
    names, overrides = changes.runs_and_overrides(options.runs_and_overrides)
    _refuse_other_words(names)
    if not names:
        raise UsageError("resume: names no run; give a run id, a run's folder, or an experiment's name")
    runs = find_runs(names)
    with extending(runs, overrides) as (runs, overrides):
        codes, _ = resume_runs(runs, overrides, options)
    starting.report(run_row.rows_of(runs), as_json=options.as_json)
    return max(codes)


def _refuse_other_words(names: Sequence[str]) -> None:
    """Raise UsageError for an experiment file, or a key without its value, in place of a run."""
    for word in names:
        if Path(word).suffix in {".yaml", ".yml"} and Path(word).is_file():
            raise UsageError(
                f"resume: {word} is a file, not a run; `hpc-train submit {word}` starts its runs, "
                "or shows how each one continues"
            )
        if "." in word and node_at(tuple(word.split("."))) is not None:
            raise UsageError(f"resume: {word} is a key; write {word}=VALUE, without spaces around =")


def resume_runs(
    runs: Sequence[RunPaths], overrides: Sequence[str], options: ResumeOptions
) -> tuple[list[ExitCode], list[str]]:
    """Resume the runs: queued ones at once, the others one after the other; return the exit codes.

    Also return the lines that report runs which were not resumed because they may be alive. With
    ``--strict-env`` both this command and the nodes compare the versions with the run's earlier ones.
    """
    request = _Request(
        [*overrides, *([_STRICT] if options.strict_env else [])],
        allocation_of(options) if options.here else options.launcher or (LOCAL if options.local else None),
        options.devices,
        is_new(options.code),
        options.strict_env,
        options.take_over,
        options.nodes,
    )
    waiting = [paths for paths in runs if stage_order.waiting_words(paths) is not None]
    runs = [paths for paths in runs if paths not in waiting]
    codes = [starting.say_waiting(paths, runs) for paths in waiting]
    for name, group in _batches(runs, request):
        before = [status.state for status in statuses(group)]
        codes += _resume_batch(name, group, request)
        if codes[-1] != ExitCode.INTERRUPTED:
            codes += _follow(group, before, request)
        if codes[-1] == ExitCode.INTERRUPTED:
            break
    return codes, request.refused


def _batches(runs: Sequence[RunPaths], request: _Request) -> list[tuple[str, list[RunPaths]]]:
    """Return the groups of runs that a launcher starts together: queued ones first, by experiment."""
    queued: dict[tuple[str, ExperimentPaths], list[RunPaths]] = {}
    followed: list[tuple[str, list[RunPaths]]] = []
    for paths in runs:
        name = request.launcher or next_launcher(paths)
        if request.launcher is None and is_factory(name):
            trust.check_run(paths)  # the files of other users must not select the code that is imported here
        if load_launcher(name).is_queue:
            queued.setdefault((name, paths.siblings), []).append(paths)
        else:
            followed.append((name, [paths]))
    if queued and request.devices is not None:
        raise UsageError(
            "--devices: is for this machine; add --local, or change the nodes that the file requests"
        )
    return [*((name, group) for (name, _), group in queued.items()), *followed]


def _resume_batch(name: str, runs: Sequence[RunPaths], request: _Request) -> list[ExitCode]:
    """Resume the runs of one experiment that can be resumed; report why the others can't."""
    launcher, codes = load_launcher(name), list[ExitCode]()
    use_nodes(launcher, request.nodes, f"resume {run_name(runs[0])}")
    with launcher.submitting(runs[0].siblings):
        newest, ready = {paths: attempts.newest_number(paths) for paths in runs}, []
        for paths, status in zip(runs, statuses(runs, is_fresh=True), strict=True):
            is_made_only = launcher.is_unsubmitted(paths)
            code = _stays(paths, status, request, is_made_only=is_made_only)
            codes += [] if code is None else [code]
            ready += [paths] if code is None else []
        checks = Preflight(launcher, on_this_machine=not launcher.is_queue)
        prepared = [_prepare(paths, request, name, launcher, checks) for paths in ready]
        refuse_never_starting(launcher, {run.paths: run.loaded for run in prepared})
        living = {run.paths: None for run in prepared if _outlives(run.paths, request)}
        codes += [_refuse_living(paths, read_status(paths), request) for paths in living]
        prepared = [run for run in prepared if run.paths not in living]
        _say_changes(prepared, is_queued=launcher.is_queue)
        _warn_of_divergence([run.paths for run in prepared], request)
        starts = [_start_request(run, request, newest[run.paths]) for run in prepared]
        for run in starts:
            action = starting.next_attempt_words(run.paths, request.overrides)
            say(f"{run_name(run.paths)}: {action}; in {run.paths.folder}")
        if starts:
            codes.append(starting.start(launcher, starts))
    return codes


def _warn_of_divergence(runs: Sequence[RunPaths], request: _Request) -> None:
    """Print the remedy if a run that diverged resumes unchanged: training is deterministic."""
    if request.overrides or request.new_code:
        return
    for paths in runs:
        record = newest_record(paths)
        if record is not None and record.cause == "diverged":
            lines = starting.next_steps(paths, read_status(paths))
            say(f"{run_name(paths)}: its last attempt diverged ({record.reason})")
            say(*(f"  {line}" for line in lines))


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
            create.note_change(paths, attempt, [*noted, *request.overrides])
        if resumption.versions.now is not None:
            create.note_versions(paths, attempt, resumption.versions.now)
        create.note_inputs(paths, experiment, has_saved=bool(committed(paths)))

    problem, devices = resumption.loaded.problem, resumption.devices
    return StartRequest(paths, experiment, problem, devices, prepare, after, starting.polling)


def _stays(paths: RunPaths, status: RunStatus, request: _Request, *, is_made_only: bool) -> ExitCode | None:
    """Return why the run is not resumed; None if it can be."""
    take_over = request.take_over
    if status.state == "completed":
        name = run_name(paths)
        names, longer = extensions(paths), longer_command(paths)
        words = f" (`{longer}` trains it longer)" if longer else ""
        words = f", extended by {', '.join(names)}" if names else words
        say(f"{name}: completed already, in {paths.folder}{words}; nothing to resume")
        return ExitCode.DONE
    if is_made_only:
        return None
    record = newest_record(paths)
    if take_over and record is not None and record.job is None and not living(record):
        return None
    if take_over and _other_cluster(paths) is not None:
        return None
    if status.state in GOING_ON:
        return _refuse_living(paths, status, request)
    # A failed run's launcher may still be ending, and ranks may outlive theirs. Queues were queried before.
    if record is not None and record.job is None and lives(paths, record) is not False:
        return _refuse_living(paths, status, request)
    return None


def _say_changes(runs: Sequence[_Resumption], *, is_queued: bool) -> None:
    """Report the overrides of the previous attempt, and changes of files and versions since."""
    for run in runs:
        if run.omitted_changes:
            omitted = " ".join(run.omitted_changes)
            say(f"{run_name(run.paths)}: omits {omitted}, with which the last attempt was refused")
    changes.say_file_changes([(run.paths, run.loaded.experiment) for run in runs], is_queued=is_queued)
    runs_by_words: dict[str, list[str]] = {}
    for run in runs:
        if text := run.versions.words:
            runs_by_words.setdefault(text, []).append(run_name(run.paths))
    for text, ids in runs_by_words.items():
        say(f"{changes.either(ids)}: {text}")


def _refuse_living(paths: RunPaths, status: RunStatus, request: _Request) -> ExitCode:
    words = f"{_living_words(paths, status)}{_how_to_change(paths, request.overrides)}"
    request.refused.append(f"{run_name(paths)}: {words}; nothing started")
    say(request.refused[-1])
    return ExitCode.FAILED


def _how_to_change(paths: RunPaths, overrides: Sequence[str]) -> str:
    """Return the commands that apply changes to an active run. Raises UsageError if they make another run."""
    record = newest_record(paths)
    process = None if record is None else record.launcher_process
    is_ours = launcher_of(paths).is_queue or (process is not None and process.is_alive())
    if not overrides or not is_ours or _other_cluster(paths) is not None:
        return ""
    _changed(paths, overrides)
    cancel, resume = (
        shlex.join(["hpc-train", verb, run_name(paths), *words])
        for verb, words in (("cancel", ()), ("resume", overrides))
    )
    return f"; to apply {' '.join(overrides)}: `{cancel} && {resume}`"


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
    if isinstance(launcher, UsesNodes):
        return f"is {state} in job {record and record.job}; `hpc-train cancel {run_name(paths)}` ends it"
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


def _prepare(
    paths: RunPaths, request: _Request, name: str, launcher: Launcher, checks: Preflight
) -> _Resumption:
    trust.check_run(paths)
    before, loaded = _changed(paths, request.overrides)
    job = loaded.experiment
    devices = launcher.choose_devices(job, _devices(paths, request, name))

    def spent() -> list[str]:
        is_limited = launcher.is_queue or isinstance(launcher, UsesNodes)
        problem = spent_budget(job, records(paths)) if is_limited else None
        return [] if problem is None else [loaded.source.render(problem)]

    run = Candidate(job, launcher.ranks(job, devices), paths)
    if problems := checks.of_resumed(loaded, run, budget=spent):
        raise BadFileError(problems)
    if DATA in create.inputs_differ(paths, job) and committed(paths):
        raise BadFileError(
            f"{DATA}: the files are not those that {paths.folder.name} was trained on so far; put them "
            "back, or submit the file again with --new"
        )
    then, now = changes.other_python(last_launcher(paths), before.experiment), changes.other_python(name, job)
    versions = changes.version_change(paths, then, now, new_code=request.new_code)
    if versions.differences and job.environment.strict:
        _refuse_versions(paths, versions.differences, request)
    refused = [override for override in create.refused_changes(paths) if override not in request.overrides]
    return _Resumption(paths, loaded, devices, versions, refused)


def _devices(paths: RunPaths, request: _Request, name: str) -> int | None:
    """Return the ``--devices`` of the command line, else of the last attempt by the same launcher.

    Before the first, that of the run that this one extends.
    """
    record = newest_record(paths)
    if record is None and (extended := extended_run(paths)) is not None:
        record = newest_record(extended)
    if request.devices is not None or record is None or name != last_launcher(paths):
        return request.devices
    return record.devices


def _refuse_versions(paths: RunPaths, differences: Differences, request: _Request) -> None:
    reason, remedy = "environment.strict: true", "add environment.strict=false"
    if request.strict:
        reason, remedy = "--strict-env", "omit it"
    raise UsageError(
        f"{run_name(paths)}: other versions than the run had: {in_words(differences)}; "
        f"{reason} refuses that: resume it where it had those, or {remedy}"
    )


def _changed(paths: RunPaths, overrides: Sequence[str]) -> tuple[Loaded, Loaded]:
    """Return the current and the changed experiment. Raises UsageError if the latter is another run."""
    earlier = create.noted_changes(paths, attempts.newest_number(paths) + 1)
    before = frozen_experiment.load_changed(paths, earlier)
    if not overrides:
        return before, before
    after = frozen_experiment.load_changed(paths, [*earlier, *overrides], check_names=True)
    if refused := changes.other_run_keys(before.experiment, after.experiment):
        head = f"{', '.join(refused)}: would make {run_name(paths)} another run; start one of its own"
        raise UsageError(starting.other_run(paths, head, overrides))
    return before, after
