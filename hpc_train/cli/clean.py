"""``clean`` and ``rm``: list, then remove, files that a run no longer needs, or whole runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from hpc_train.cli.command_options import CleanOptions, RemoveOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import put, put_json, say
from hpc_train.errors import ExitCode, NoSchedulerError, TryAgainError, UsageError, UserError, counted
from hpc_train.launchers.base import Launcher
from hpc_train.launchers.lookup import by_launcher
from hpc_train.paths import RunPaths
from hpc_train.recovery.history import current_status
from hpc_train.run import checkpoints, evaluation_jobs
from hpc_train.run.attempts import claim_attempt, newest_number, no_claims, read_record
from hpc_train.run.code.snapshot import unused_snapshots
from hpc_train.run.files import read_json, remove_folder
from hpc_train.run.find import find_runs, run_name, run_names
from hpc_train.run.liveness import lives, living, newest_record
from hpc_train.run.run_status import GOING_ON, RunStatus, read_status

_UNUSED_CODE = "code that no run uses"


class RemovedJson(TypedDict):
    """A file or folder that was removed."""

    path: str
    bytes: int
    why: str


class CleanedRun(TypedDict):
    """The files that a run no longer needed, and its checkpoints."""

    id: str
    name: str
    path: str
    removed: list[RemovedJson]
    #: Folders of checkpoints that are still there.
    checkpoints: list[str]


class Cleaning(TypedDict):
    """The removed files; none if the answer was no."""

    runs: list[CleanedRun]
    #: Snapshots of code that no run used.
    code: list[RemovedJson]
    #: Of all that was removed.
    bytes: int


class RemovedRun(TypedDict):
    """A run that was removed, as it was."""

    id: str
    name: str
    path: str
    state: str
    step: int
    bytes: int


class Removal(TypedDict):
    """The runs that were removed; none if the answer was no."""

    runs: list[RemovedRun]
    code: list[RemovedJson]
    bytes: int


class LivingRunError(UserError):
    """The run still writes to its folder."""


@dataclass(frozen=True)
class _Surplus:
    """A file or folder to remove, and why."""

    path: Path
    why: str

    @cached_property
    def size_bytes(self) -> int:
        """The size when it was first read."""
        return _size_bytes(self.path)

    def to_json(self) -> RemovedJson:
        """Return its entry in the JSON output of ``clean`` and ``remove``."""
        return {"path": str(self.path.absolute()), "bytes": self.size_bytes, "why": self.why}


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*"))


def clean(options: CleanOptions) -> ExitCode:
    """List and remove the items, after confirmation unless ``yes``. Refuses if any run is still active."""
    removed, code = _clean(options)
    if options.as_json:
        items = [*code, *(item for items_of_run in removed.values() for item in items_of_run)]
        cleaned = Cleaning(
            runs=[
                {
                    "id": paths.folder.name,
                    "name": paths.siblings.folder.name,
                    "path": str(paths.folder.absolute()),
                    "removed": [item.to_json() for item in items_of_run],
                    "checkpoints": [
                        str(checkpoint.folder.absolute()) for checkpoint in paths.checkpoint_folders()
                    ],
                }
                for paths, items_of_run in removed.items()
            ],
            code=[item.to_json() for item in code],
            bytes=sum(item.size_bytes for item in items),
        )
        put_json(cleaned)
    return ExitCode.DONE


def _clean(options: CleanOptions) -> tuple[dict[RunPaths, list[_Surplus]], list[_Surplus]]:
    runs = find_runs(options.runs)
    for paths in runs:
        _refuse_living(paths)
    attempts = {paths: newest_number(paths) for paths in runs}
    surplus = {paths: _surplus(paths) for paths in runs}
    for paths, items in surplus.items():
        _say(items)
        if not items:
            say(f"{paths.folder}: nothing to remove")
    folders = {paths.siblings.snapshots for paths in runs}
    code = [_Surplus(path, _UNUSED_CODE) for folder in folders for path in _unused(folder)]
    _say(code)
    if not code and not any(surplus.values()):
        return surplus, []
    if not options.yes and not _confirmed("clean", "Remove all of it?"):
        say("nothing was removed")
        return {paths: [] for paths in runs}, []
    for paths, items in surplus.items():
        with no_claims(paths):
            _refuse_living(paths)  # the answer may have taken an hour
            if newest_number(paths) != attempts[paths]:
                raise LivingRunError(f"{run_name(paths)} was resumed in the meantime; run clean again")
            for item in items:
                _remove(item.path)
    unused = {path for folder in folders for path in _unused(folder)}  # a submit may have begun to use some
    removed = [item for item in code if item.path in unused]
    for item in removed:
        remove_folder(item.path)
    return surplus, removed


def _say(items: Sequence[_Surplus]) -> None:
    say(*(f"{item.path}  {item.size_bytes / 1e6:.1f} MB  {item.why}" for item in items))


def _refuse_living(paths: RunPaths) -> None:
    record = newest_record(paths)
    state = current_status(paths).state
    if state in GOING_ON or (record is not None and lives(paths, record) is not False):
        raise LivingRunError(f"{run_name(paths)} is {state}; clean it once it has ended")


def _surplus(paths: RunPaths) -> list[_Surplus]:
    """Return the files of hpc-train that the run no longer needs; targets of links are kept."""
    surplus = [_Surplus(paths.cache, "cache")] if paths.cache.exists() else []
    if not paths.checkpoints.is_dir() or paths.checkpoints.is_symlink():
        return surplus
    newest = next((saved for saved in checkpoints.committed(paths) if not checkpoints.verify(saved)), None)
    best = checkpoints.kept_best(paths)
    needed = [] if newest is None else [newest.folder]
    if newest is not None and best is not None:
        needed.append(paths.checkpoint(best.step).folder)
    needed += [paths.checkpoint(step).folder for step in evaluation_jobs.submitted(paths)]
    folders = {checkpoint.folder for checkpoint in paths.checkpoint_folders()}
    for path in sorted(paths.checkpoints.glob("step-*")):
        is_set_aside = checkpoints.is_set_aside(path)
        if checkpoints.is_left_over(path):
            surplus.append(_Surplus(path, "not finished"))
        elif not is_set_aside and (path not in folders or path.is_symlink() or not path.is_dir()):
            continue
        # Without an intact one, the user may want to repair any of them.
        elif newest is not None and path not in needed:
            reason = "damaged, set aside" if is_set_aside else _why(paths, path, newest.folder)
            surplus.append(_Surplus(path, reason))
    return surplus


def _why(paths: RunPaths, path: Path, newest: Path) -> str:
    """Return why a checkpoint is not needed in addition to ``newest``, the newest intact and valid one."""
    if path.name < newest.name:
        return f"older than {newest.name}"
    counting = (*checkpoints.committed(paths), *checkpoints.damaged(paths))
    if path in [checkpoint.folder for checkpoint in counting]:
        return "damaged"
    return "does not count: its attempt no longer owned the run"


def _unused(snapshots: Path) -> list[Path]:
    try:
        return unused_snapshots(snapshots)
    except OSError as error:
        why = f"{error.filename or 'a run'} can't be read: {error.strerror or error}"
        say(f"{snapshots}: kept, since {why}")
        return []


def _remove_unused_code(snapshots: Path) -> Iterator[_Surplus]:
    """Remove code that no run uses, and list it; a submit may have started using it meanwhile."""
    for path in _unused(snapshots):
        item = _Surplus(path, _UNUSED_CODE)
        _ = item.size_bytes  # while the folder exists
        remove_folder(path)
        say(f"{path}  removed: {_UNUSED_CODE}")
        yield item


def _confirmed(command: str, question: str) -> bool:
    """Prompt on the terminal. Raises UsageError if there is no terminal."""
    if not sys.stdin.isatty():
        raise UsageError(f"{command}: no terminal to ask for confirmation; add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.parent.name == "checkpoints":
        checkpoints.remove(path)
    else:
        shutil.rmtree(path)


class ForeignFolderError(UserError):
    """The folder is not provably a run that this user's hpc-train created."""


def rm(options: RemoveOptions) -> ExitCode:
    """Remove the runs, after confirmation unless ``yes``; none if one is active or has foreign files."""
    runs = find_readable(options.runs)
    names = run_names(runs)
    status_of = _ended(runs)
    for paths in runs:
        _check_ours(paths)
    facts = [_facts(paths, status_of[paths]) for paths in runs]
    for paths, run in zip(runs, facts, strict=True):
        size = f"{run['bytes'] / 1e6:.1f} MB"
        say(f"{names[paths]}  {run['state']} at step {run['step']}  {size}  {paths.folder}")
    if not options.yes and not _agreed(len(runs)):
        say("nothing was removed")
        runs, facts = [], []
    for paths in runs:
        _remove_run(paths)
        (say if options.as_json else put)(f"{names[paths]}  removed")
    snapshots = {paths.siblings.snapshots for paths in runs}
    code = [item for folder in snapshots for item in _remove_unused_code(folder)]
    for siblings in {paths.siblings for paths in runs}:
        with suppress(OSError):  # it has other runs, or files of no run
            siblings.folder.rmdir()
    if options.as_json:
        total = sum(run["bytes"] for run in facts) + sum(item.size_bytes for item in code)
        put_json(Removal(runs=facts, code=[item.to_json() for item in code], bytes=total))
    return ExitCode.DONE


def _facts(paths: RunPaths, status: RunStatus) -> RemovedRun:
    """Return the ``--json`` entry of a run that is still there."""
    return {
        "id": paths.folder.name,
        "name": paths.siblings.folder.name,
        "path": str(paths.folder.absolute()),
        "state": status.state,
        "step": status.step,
        "bytes": _size_bytes(paths.folder),
    }


def _ended(runs: Sequence[RunPaths]) -> dict[RunPaths, RunStatus]:
    """Return the runs' status; each launcher is queried once. Raises LivingRunError if one is not over."""
    status_of: dict[RunPaths, RunStatus] = {}
    for launcher, some in by_launcher(runs):
        status_of |= dict(zip(some, _fresh_status(launcher, some), strict=True))
        for paths in some if launcher.is_queue else ():
            if steps := evaluation_jobs.submitted(paths):
                name, count = run_name(paths), counted(len(steps), "evaluation")
                raise LivingRunError(
                    f"{name}: jobs of {count} wait or run; end them with `hpc-train cancel {name}` first"
                )
    for paths in runs:
        record = newest_record(paths)
        is_living = record is not None and record.job is None and living(record) is not False
        if status_of[paths].state in GOING_ON or is_living:
            name, status = run_name(paths), status_of[paths]
            reason = f" ({status.reason})" if status.reason else ""
            raise LivingRunError(
                f"{name}: is {status.state}{reason}; end it with `hpc-train cancel {name}` first"
            )
    return status_of


def _fresh_status(launcher: Launcher, runs: Sequence[RunPaths]) -> list[RunStatus]:
    """Return the runs' current status; without an answer of the scheduler, use that of completed runs."""
    try:
        return launcher.status(runs, is_fresh=True)
    except NoSchedulerError:
        recorded = list(map(read_status, runs))
        if any(status.state != "completed" for status in recorded):  # it may be in the queue again
            raise
        return recorded


def _check_ours(paths: RunPaths) -> None:
    """Raise ForeignFolderError unless everything indicates that the folder is a run created by this user."""
    facts = read_json(paths.run) or {}
    if paths.folder.is_symlink():
        why = "is a link; remove the run where it is, or the link"
    elif paths.folder.lstat().st_uid != os.geteuid():
        why = "belongs to another user"
    elif (facts.get("name"), facts.get("id")) != (paths.siblings.folder.name, paths.folder.name):
        why = f"says in {paths.run.name} that it is {facts.get('name')}/{facts.get('id')}: a copy or moved"
    elif foreign := sorted({path.name for path in paths.folder.iterdir()} - _entries(paths)):
        why = f"contains files that hpc-train did not write: {', '.join(foreign)}; move them out first"
    else:
        return
    raise ForeignFolderError(f"{paths.folder}: {why}; nothing was removed")


def _entries(paths: RunPaths) -> set[str]:
    """Return the names that hpc-train writes, with half-written files: ``.status.json.0a1b2c3d``."""
    names = RunPaths.entry_names()
    half_written = {
        path.name for path in paths.folder.glob(".*.*") if path.name[1:].rpartition(".")[0] in names
    }
    return names | half_written


def _remove_run(paths: RunPaths) -> None:
    """Remove the run; an attempt is claimed first, so that no command starts one meanwhile."""
    number = claim_attempt(paths, "rm")
    try:
        before = [read_record(attempt) for attempt in paths.attempt_folders() if attempt.number < number]
        if before and before[-1] and before[-1].job is None and living(before[-1]) is not False:
            raise TryAgainError(f"{run_name(paths)}: another command has just started it; it is kept")
        aside = paths.folder.with_name(f".{paths.folder.name}.removed-{os.getpid()}")
        paths.folder.rename(aside)
    except BaseException:
        shutil.rmtree(paths.attempt(number).folder, ignore_errors=True)
        raise
    shutil.rmtree(aside)


def _agreed(count: int) -> bool:
    what = "this run" if count == 1 else f"these {count} runs"
    return _confirmed("rm", f"Remove {what} with all checkpoints and logs, and code that is then unused?")
