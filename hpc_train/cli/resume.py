"""``resume``: unfinished runs go on from their newest valid checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_train.cli.code import code_on_resume, is_new
from hpc_train.cli.file_changes import either, say_file_changes
from hpc_train.cli.next_steps import has_saved, new_run_command, next_attempt_words
from hpc_train.cli.printing import say
from hpc_train.cli.queueing import Queue, resume_all, section_problems
from hpc_train.cli.standing import standing, standings
from hpc_train.cli.starting import LOCAL, choose_devices, load_launcher, report, say_end, start_attempt
from hpc_train.cli.status import rows_of
from hpc_train.cli.version_changes import VersionChange, other_python, version_change
from hpc_train.config.loading import Loaded, load
from hpc_train.config.rules import check_start
from hpc_train.config.schema import Experiment
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import QueueingLauncher
from hpc_train.launchers.slurm import LAUNCHER as SLURM
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.plan.identity import changes_identity
from hpc_train.plan.inputs import DATA
from hpc_train.plan.planning import fewest_slurm_ranks, slurm_ranks, slurm_ranks_per_node
from hpc_train.run_folder.attempts import newest_number
from hpc_train.run_folder.checkpoints import committed
from hpc_train.run_folder.creation import (
    inputs_differ,
    note_inputs,
    note_versions,
    noted_changes,
    refused_changes,
)
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.finding import find_runs, run_name
from hpc_train.run_folder.liveness import (
    SILENT_LIMIT_S,
    end_living,
    lives,
    living,
    minutes,
    newest_record,
    silent_s,
)
from hpc_train.run_folder.micro_batch import kept_size
from hpc_train.run_folder.status import GOING_ON, RunStatus, read_status
from hpc_train.run_folder.trust import check_run
from hpc_train.run_folder.versions import Differences, in_words

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
_STRICT = "environment.strict=true"
#: Not the run's identity, but where it lies and what it is one of.
_FIXED: dict[str, Callable[[Experiment], object]] = {
    "name": lambda experiment: experiment.name,
    "sweep.grid": lambda experiment: experiment.sweep.grid,
    # Unlike the rest of its section it changes the mathematics.
    "parallel.sync_batchnorm": lambda experiment: experiment.parallel.sync_batchnorm,
}


@dataclass(frozen=True)
class _Wish:
    """What the command line asks of every run."""

    overrides: list[str]
    launcher: str | None
    devices: int | None
    new_code: bool
    strict: bool
    #: Also runs of which nobody here can tell whether they still run.
    take_over: bool = False


def start_again(paths: RunPaths, overrides: Sequence[str], launcher: str, devices: int | None) -> ExitCode:
    """Train a run that has ended without a checkpoint again, with the current code; follow it."""
    return _resume_one(paths, _Wish(list(overrides), launcher, devices, new_code=True, strict=False))


def queue_again(
    queue: Queue, folder: ExperimentPaths, runs: Sequence[RunPaths], overrides: Sequence[str]
) -> ExitCode:
    """Put runs that have ended without a checkpoint into the queue again, with the current code."""
    wish = _Wish(list(overrides), queue.name, None, new_code=True, strict=False)
    return max(_enqueue(queue, folder, runs, wish))


@dataclass(frozen=True)
class _Resumption:
    """One run that goes on, all of it checked."""

    paths: RunPaths
    loaded: Loaded
    launcher: str
    devices: int | None
    versions: VersionChange
    #: Changes of the attempt before, which was refused with them.
    left_out: list[str]


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
    """Let the runs go on: those of a queue at once, the others one after the other; return the worst end.

    ``strict_env``: refuses, here and on the nodes, where versions are others than the run had.
    """
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    run_words = [word for word in words if word not in overrides]
    if not run_words:
        raise UsageError("resume: names no run; give a run id, a run's folder, or an experiment's name")
    overrides += [_STRICT] if strict_env else []
    launcher = LOCAL if local and launcher is None else launcher
    wish = _Wish(overrides, launcher, devices, is_new(code), strict_env, take_over)
    runs = find_runs(run_words)
    codes, here = _enqueue_all(runs, wish)
    for paths in here:
        codes.append(_resume_one(paths, wish))
        if codes[-1] == ExitCode.INTERRUPTED:
            break
    report(rows_of(runs), as_json=as_json)
    return max(codes)


def _enqueue_all(runs: Sequence[RunPaths], wish: _Wish) -> tuple[list[ExitCode], list[RunPaths]]:
    """Put the runs of launchers with a queue into it; return how each went, and the other runs."""
    groups: dict[tuple[str, ExperimentPaths], list[RunPaths]] = {}
    here: list[RunPaths] = []
    for paths in runs:
        name = wish.launcher or _last_launcher(paths)
        if isinstance(load_launcher(name), QueueingLauncher):
            groups.setdefault((name, paths.siblings), []).append(paths)
        else:
            here.append(paths)
    if groups and wish.devices is not None:
        raise UsageError("--devices: is for this machine; add --local, or change slurm.nodes and its like")
    codes: list[ExitCode] = []
    for (name, folder), some in groups.items():
        launcher = load_launcher(name)
        assert isinstance(launcher, QueueingLauncher)
        codes += _enqueue(Queue(name, launcher), folder, some, wish)
    return codes, here


def _enqueue(queue: Queue, folder: ExperimentPaths, runs: Sequence[RunPaths], wish: _Wish) -> list[ExitCode]:
    with queue.launcher.submitting(folder):
        codes: list[ExitCode] = []
        ready: list[RunPaths] = []
        for paths, status in zip(runs, standings(runs, is_fresh=True), strict=True):
            code = _stays(paths, status, is_made_only=queue.launcher.is_unsubmitted(paths))
            codes += [] if code is None else [code]
            ready += [paths] if code is None else []
        prepared = [_prepare(paths, wish, queue.name) for paths in ready]
        if prepared:
            _say_changes(prepared, with_slurm=True)
            pairs = [(each.paths, each.loaded) for each in prepared]
            versions = {each.paths: each.versions.now for each in prepared}
            codes.append(resume_all(queue, pairs, wish.overrides, new_code=wish.new_code, versions=versions))
    return codes


def _stays(
    paths: RunPaths, status: RunStatus, *, is_made_only: bool = False, take_over: bool = False
) -> ExitCode | None:
    """Say why the run is not resumed; None where it can be.

    ``take_over``: it can also be where nobody here can tell whether it still runs.
    """
    if status.state == "completed":
        say(f"{run_name(paths)}: completed already, in {paths.folder}; nothing to resume")
        return ExitCode.DONE
    if is_made_only:
        return None
    record = newest_record(paths)
    if take_over and record is not None and record.slurm_job is None and not living(record):
        return None
    if status.state in GOING_ON:
        return _refuse_living(paths, status)
    # A failed run's launcher may still be ending, and ranks may outlive theirs. Of Slurm's Slurm was asked.
    if record is not None and record.slurm_job is None and lives(paths, record) is not False:
        return _refuse_living(paths, status)
    return None


def _resume_one(paths: RunPaths, wish: _Wish) -> ExitCode:
    """Let one run go on and follow it."""
    after = newest_number(paths)
    code = _stays(paths, standing(paths, is_fresh=True), take_over=wish.take_over)
    if code is not None:
        return code
    prepared = _prepare(paths, wish, wish.launcher or _last_launcher(paths))
    record = newest_record(paths)
    is_ours_to_end = record is not None and record.slurm_job is None
    if is_ours_to_end and end_living(paths, take_over=wish.take_over) is not None:
        return _refuse_living(paths, read_status(paths))
    _say_changes([prepared], with_slurm=False)
    new_code = code_on_resume(paths, prepared.loaded.experiment, new=wish.new_code)

    def change(attempt: int) -> None:
        if new_code is not None:
            new_code.apply(attempt)
        if prepared.versions.now is not None:
            note_versions(paths, attempt, prepared.versions.now)
        note_inputs(paths, prepared.loaded.experiment, has_saved=bool(committed(paths)))

    say(f"{run_name(paths)}: {next_attempt_words(paths, wish.overrides)}; in {paths.folder}")
    code = start_attempt(
        paths, prepared.launcher, prepared.devices, wish.overrides, after=after, prepare=change
    )
    say_end(paths, code)
    return code


def _say_changes(runs: Sequence[_Resumption], *, with_slurm: bool) -> None:
    """Say what the attempt before had otherwise, and what has changed since in files and versions."""
    for each in runs:
        if each.left_out:
            changes = " ".join(each.left_out)
            say(f"{run_name(each.paths)}: leaves out {changes}, with which the last attempt was refused")
    say_file_changes([(each.paths, each.loaded.experiment) for each in runs], with_slurm=with_slurm)
    told: dict[str, list[str]] = {}
    for each in runs:
        if words := each.versions.words:
            told.setdefault(words, []).append(run_name(each.paths))
    for words, ids in told.items():
        say(f"{either(ids)}: {words}")


def _refuse_living(paths: RunPaths, status: RunStatus) -> ExitCode:
    say(f"{run_name(paths)}: {_living_words(paths, status)}; nothing started")
    return ExitCode.FAILED


def _living_words(paths: RunPaths, status: RunStatus) -> str:
    record, state = newest_record(paths), status.state
    if _last_launcher(paths) == SLURM:
        reason = f" ({status.reason})" if status.reason else ""
        return f"is {state} on Slurm{reason}; `hpc-train cancel {run_name(paths)}` ends it"
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


def _last_launcher(paths: RunPaths) -> str:
    record = newest_record(paths)
    noted = (read_json(paths.run) or {}).get("launcher")
    return str(noted or (record and record.launcher) or LOCAL)


def _prepare(paths: RunPaths, wish: _Wish, name: str) -> _Resumption:
    """Check everything before anything is changed."""
    check_run(paths)
    before, loaded = _changed(paths, wish.overrides)
    devices = _devices(paths, wish, name, loaded.experiment)
    slurm = loaded.experiment.slurm
    ranks = slurm_ranks(slurm) if name == SLURM else devices
    per_node = slurm_ranks_per_node(slurm) if name == SLURM else devices
    fewest = fewest_slurm_ranks(slurm) if name == SLURM else devices
    problems = [
        loaded.problem(problem.path, problem.message, problem.remedy)
        for problem in check_start(loaded.experiment, ranks, per_node, fewest, kept_size(paths))
    ]
    problems += section_problems(name, loaded)
    if problems:
        raise BadFileError(problems)
    _refuse_other_inputs(paths, loaded.experiment)
    load_launcher(name)
    pythons = other_python(_last_launcher(paths), before.experiment), other_python(name, loaded.experiment)
    versions = version_change(paths, *pythons, new_code=wish.new_code)
    if versions.differences and loaded.experiment.environment.strict:
        _refuse_versions(paths, versions.differences, wish)
    left_out = [override for override in refused_changes(paths) if override not in wish.overrides]
    return _Resumption(paths, loaded, name, devices, versions, left_out)


def _devices(paths: RunPaths, wish: _Wish, name: str, experiment: Experiment) -> int | None:
    record = newest_record(paths)
    devices = wish.devices
    if devices is None and record is not None and record.slurm_job is None and name == _last_launcher(paths):
        devices = record.devices
    return choose_devices(name, experiment, devices)


def _refuse_versions(paths: RunPaths, differences: Differences, wish: _Wish) -> None:
    asked, remedy = "environment.strict: true", "add environment.strict=false"
    if wish.strict:
        asked, remedy = "--strict-env", "leave it out"
    found = in_words(differences)
    raise UsageError(
        f"{run_name(paths)}: other versions than the run had: {found}; {asked} refuses that: "
        f"resume it where it had those, or {remedy}"
    )


def _refuse_other_inputs(paths: RunPaths, experiment: Experiment) -> None:
    """Raise BadFileError where a run that has saved something would continue on other data."""
    if DATA in inputs_differ(paths, experiment) and committed(paths):
        raise BadFileError(
            f"{DATA}: the files are not those that {paths.folder.name} was trained on so far; put them "
            "back, or submit the file again with --new"
        )


def _changed(paths: RunPaths, overrides: Sequence[str]) -> tuple[Loaded, Loaded]:
    """Return the experiment as it is and as it would be. Raises UsageError where that is another run."""
    earlier = noted_changes(paths, newest_number(paths) + 1)
    before = load(paths.experiment, earlier, check_names=False)
    if not overrides:
        return before, before
    after = load(paths.experiment, [*earlier, *overrides])
    refused = changes_identity(before.experiment, after.experiment)
    refused += [key for key, value in _FIXED.items() if value(before.experiment) != value(after.experiment)]
    if refused:
        raise UsageError(_other_run(paths, refused, overrides))
    return before, after


def _other_run(paths: RunPaths, refused: Sequence[str], overrides: Sequence[str]) -> str:
    """Say how to train with keys that a resume can't change: as a run of its own."""
    run = run_name(paths)
    words = f"{', '.join(refused)}: would make {run} another run; start one of its own:\n"
    words += f"  from step 0: `{new_run_command(paths, overrides)}`"
    if has_saved(paths):
        weights = f"{paths.folder.name}.safetensors"
        command = new_run_command(paths, [*overrides, f"model.pretrained={weights}"])
        words += f"\n  from its weights: `hpc-train export {run} -o {weights}`, then `{command}`"
    return words
