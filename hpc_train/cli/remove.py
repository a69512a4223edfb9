"""``rm``: removes runs completely, after confirmation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hpc_train.cli.clean import LivingRunError, Surplus, confirmed, remove_unused_code, size_bytes
from hpc_train.cli.unreadable import find_readable
from hpc_train.console import JSON_VERSION, put, put_json, say
from hpc_train.errors import ExitCode, NoSchedulerError, TryAgainError, UserError
from hpc_train.launchers.base import Launcher
from hpc_train.launchers.lookup import by_launcher
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt, read_record
from hpc_train.run.files import read_json
from hpc_train.run.find import run_name, run_names
from hpc_train.run.liveness import living, newest_record
from hpc_train.run.run_status import GOING_ON, RunStatus, read_status


class ForeignFolderError(UserError):
    """The folder is not provably a run that this user's hpc-train created."""


def remove(names_or_ids: Sequence[str], *, yes: bool, as_json: bool = False) -> ExitCode:
    """List the runs and remove them, after confirmation unless ``yes``.

    Nothing is removed if any of the runs is running or queued, or its folder contains foreign files.
    """
    runs = find_readable(names_or_ids)
    names = run_names(runs)
    status_of = _ended(runs)
    for paths in runs:
        _check_ours(paths)
    facts = [_facts(paths, status_of[paths]) for paths in runs]
    for paths, each in zip(runs, facts, strict=True):
        size = f"{each['bytes'] / 1e6:.1f} MB"
        say(f"{names[paths]}  {each['state']} at step {each['step']}  {size}  {paths.folder}")
    if not yes and not _agreed(len(runs)):
        say("nothing was removed")
        runs, facts = [], []
    for paths in runs:
        _remove(paths)
        (say if as_json else put)(f"{names[paths]}  removed")
    snapshots = {paths.siblings.snapshots for paths in runs}
    code = [item for folder in snapshots for item in remove_unused_code(folder)]
    for siblings in {paths.siblings for paths in runs}:
        with suppress(OSError):  # it has other runs, or files of no run
            siblings.folder.rmdir()
    if as_json:
        put_json(_to_json(facts, code))
    return ExitCode.DONE


def _facts(paths: RunPaths, status: RunStatus) -> dict[str, Any]:
    """Return the ``--json`` entry of a run that is still there."""
    name, path = paths.siblings.folder.name, str(paths.folder.absolute())
    known = {"id": paths.folder.name, "name": name, "path": path, "state": status.state, "step": status.step}
    return known | {"bytes": size_bytes(paths.folder)}


def _to_json(runs: Sequence[dict[str, Any]], code: Sequence[Surplus]) -> dict[str, Any]:
    total = sum(each["bytes"] for each in runs) + sum(item.size_bytes for item in code)
    return {"version": JSON_VERSION, "runs": runs, "code": [item.to_json() for item in code], "bytes": total}


def _ended(runs: Sequence[RunPaths]) -> dict[RunPaths, RunStatus]:
    """Return the runs' status; each launcher is queried once. Raises LivingRunError if one is not over."""
    status_of: dict[RunPaths, RunStatus] = {}
    for launcher, some in by_launcher(runs):
        status_of |= dict(zip(some, _fresh_status(launcher, some), strict=True))
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
        found = list(map(read_status, runs))
        if any(status.state != "completed" for status in found):  # it may be in the queue again
            raise
        return found


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
    """Return the names written by hpc-train, including files of an interrupted write:
    ``.status.json.0a1b2c3d``.
    """
    known = RunPaths.entry_names()
    half_written = {
        path.name for path in paths.folder.glob(".*.*") if path.name[1:].rpartition(".")[0] in known
    }
    return known | half_written


def _remove(paths: RunPaths) -> None:
    """Remove the run; an attempt is claimed first, so that no command starts one meanwhile."""
    number = claim_attempt(paths, "rm")
    try:
        before = [read_record(each) for each in paths.attempt_folders() if each.number < number]
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
    return confirmed("rm", f"Remove {what} with all checkpoints and logs, and code that is then unused?")
