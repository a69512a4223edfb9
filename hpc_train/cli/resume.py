"""``resume``: unfinished runs go on from their newest valid checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_train.cli.printing import say
from hpc_train.cli.starting import LOCAL, choose_devices, load_launcher, report, say_end, start_attempt
from hpc_train.cli.status import RunRow
from hpc_train.config.loading import Loaded, load
from hpc_train.config.rules import check_start
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.paths import RunPaths
from hpc_train.plan.identity import changes_identity
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.finding import find_runs
from hpc_train.run_folder.liveness import end_living, newest_record
from hpc_train.run_folder.status import GOING_ON, current_status

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
#: Not the run's identity, but where it lies and what it is one of.
_FIXED = ("name", "sweep")


@dataclass(frozen=True)
class _Resumption:
    """One run that goes on, all of it checked."""

    paths: RunPaths
    launcher: str
    devices: int | None
    overrides: list[str] = field(default_factory=list)


def resume(
    words: Sequence[str], *, local: bool, devices: int | None, as_json: bool, launcher: str | None
) -> ExitCode:
    """Let the runs go on, one after the other; return how the worst ended."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    run_words = [word for word in words if word not in overrides]
    if not run_words:
        raise UsageError("resume: names no run; give a run id, a run's folder, or an experiment's name")
    runs = find_runs(run_words)
    asked_launcher = LOCAL if local and launcher is None else launcher
    codes = []
    for paths in runs:
        codes.append(_resume_one(paths, overrides, asked_launcher, devices))
        if codes[-1] == ExitCode.INTERRUPTED:
            break
    report([RunRow.of(paths) for paths in runs], as_json=as_json)
    return max(codes)


def _resume_one(
    paths: RunPaths, overrides: Sequence[str], launcher: str | None, devices: int | None
) -> ExitCode:
    run_id, status = paths.folder.name, current_status(paths)
    if status.state == "completed":
        say(f"{run_id}: completed already, in {paths.folder}; nothing to resume")
        return ExitCode.DONE
    if status.state in GOING_ON:
        return _refuse_living(paths, status.state)
    prepared = _prepare(paths, overrides, launcher, devices)
    # A failed run's launcher may still be ending, and ranks may outlive theirs.
    if end_living(paths) is not None:
        return _refuse_living(paths, status.state)
    say(f"{run_id}: going on in {paths.folder}")
    if overrides:
        say(f"{run_id}: from this attempt on {' '.join(overrides)}")
    code = start_attempt(paths, prepared.launcher, prepared.devices, prepared.overrides)
    say_end(paths, code)
    return code


def _refuse_living(paths: RunPaths, state: str) -> ExitCode:
    say(f"{paths.folder.name}: {_living_words(paths, state)}; nothing started")
    return ExitCode.FAILED


def _living_words(paths: RunPaths, state: str) -> str:
    record = newest_record(paths)
    if record is None or record.launcher_process is None:
        return f"is {state} already"
    process = record.launcher_process
    if process.is_alive():
        return f"is {state}, its launcher (process {process.pid} on {process.host}) lives"
    if record.launcher not in {None, LOCAL}:
        return (
            f"is {state} with launcher {record.launcher}, which alone knows whether it lives; end it there, "
            "or begin again beside it with `hpc-train submit FILE --new`"
        )
    return f"may still live on {process.host}, which can't be seen from here; resume it there"


def _prepare(
    paths: RunPaths, overrides: Sequence[str], launcher: str | None, devices: int | None
) -> _Resumption:
    """Check everything before anything is changed."""
    loaded = _changed(paths, overrides)
    record = newest_record(paths)
    had = (record and record.launcher) or (read_json(paths.run) or {}).get("launcher") or LOCAL
    name = launcher or str(had)
    if devices is None and record is not None and name == had:
        devices = record.devices
    devices = choose_devices(name, loaded.experiment, devices)
    problems = check_start(loaded.experiment, devices)
    if problems:
        raise BadFileError(
            [loaded.problem(problem.path, problem.message, problem.remedy) for problem in problems]
        )
    load_launcher(name)
    return _Resumption(paths, name, devices, list(overrides))


def _changed(paths: RunPaths, overrides: Sequence[str]) -> Loaded:
    """Return the experiment as it would be. Raises UsageError where that would be another run."""
    earlier = _earlier_changes(paths)
    before = load(paths.experiment, earlier, check_names=False)
    if not overrides:
        return before
    after = load(paths.experiment, [*earlier, *overrides])
    refused = changes_identity(before.experiment, after.experiment)
    refused += [key for key in _FIXED if getattr(before.experiment, key) != getattr(after.experiment, key)]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: would make {paths.folder.name} another run; "
            "submit the file with it as a run of its own"
        )
    return after


def _earlier_changes(paths: RunPaths) -> list[str]:
    """Return the changes of earlier attempts, the oldest first; a later one of the same key wins."""
    noted = (read_json(paths.run) or {}).get("changes") or {}
    return [str(override) for number in sorted(noted, key=int) for override in noted[number]]
