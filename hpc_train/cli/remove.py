"""``rm``: removes runs whole, after asking."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.cli.clean import LivingRunError, remove_unused_code
from hpc_train.cli.printing import put, say
from hpc_train.cli.standing import standing
from hpc_train.errors import ExitCode, NoSlurmError, TryAgainError, UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import claim_attempt, read_record
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.finding import find_runs, run_name, run_names
from hpc_train.run_folder.liveness import living, newest_record
from hpc_train.run_folder.status import GOING_ON, RunStatus, read_status


class ForeignFolderError(UserError):
    """The folder is not provably a run that this user's hpc-train made."""


def remove(words: Sequence[str], *, yes: bool) -> ExitCode:
    """Say which runs would go, ask unless ``yes``, remove them.

    Nothing is removed where any of the runs is running or queued, or its folder holds what is not ours.
    """
    runs = find_runs(words)
    names = run_names(runs)
    rows = [(paths, _ended(paths)) for paths in runs]
    for paths in runs:
        _check_ours(paths)
    for paths, status in rows:
        say(f"{names[paths]}  {status.state} at step {status.step}  {_size(paths.folder)}  {paths.folder}")
    if not yes and not _agreed(len(runs)):
        say("nothing was removed")
        return ExitCode.DONE
    for paths in runs:
        _remove(paths)
        put(f"{names[paths]}  removed")
    for folder in {paths.siblings.snapshots for paths in runs}:
        remove_unused_code(folder)
    return ExitCode.DONE


def _ended(paths: RunPaths) -> RunStatus:
    """Return where the run stands. Raises LivingRunError where it is not over."""
    try:
        status = standing(paths, is_fresh=True)
    except NoSlurmError:
        status = read_status(paths)
        if status.state != "completed":  # Slurm may have it in the queue again
            raise
    record = newest_record(paths)
    is_living = record is not None and record.slurm_job is None and living(record) is not False
    if status.state in GOING_ON or is_living:
        name = run_name(paths)
        raise LivingRunError(f"{name}: is {status.state}; end it with `hpc-train cancel {name}` first")
    return status


def _check_ours(paths: RunPaths) -> None:
    """Raise ForeignFolderError unless everything says that the folder is a run which this user made."""
    facts = read_json(paths.run) or {}
    if paths.folder.is_symlink():
        why = "is a link; remove the run where it is, or the link"
    elif paths.folder.lstat().st_uid != os.geteuid():
        why = "belongs to another user"
    elif (facts.get("name"), facts.get("id")) != (paths.siblings.folder.name, paths.folder.name):
        why = f"says in {paths.run.name} that it is {facts.get('name')}/{facts.get('id')}: a copy or moved"
    elif foreign := sorted({path.name for path in paths.folder.iterdir()} - _entries(paths)):
        why = f"holds what hpc-train did not put there: {', '.join(foreign)}; move that out first"
    else:
        return
    raise ForeignFolderError(f"{paths.folder}: {why}; nothing was removed")


def _entries(paths: RunPaths) -> set[str]:
    """Return the names that are ours, files of an interrupted write among them: ``.status.json.0a1b2c3d``."""
    known = RunPaths.entry_names()
    half_written = {
        path.name for path in paths.folder.glob(".*.*") if path.name[1:].rpartition(".")[0] in known
    }
    return known | half_written


def _remove(paths: RunPaths) -> None:
    """Remove the run; an attempt is claimed first, so that nobody starts one in a folder that goes."""
    number = claim_attempt(paths, "rm")
    try:
        before = [read_record(each) for each in paths.attempt_folders() if each.number < number]
        if before and before[-1] and before[-1].slurm_job is None and living(before[-1]) is not False:
            raise TryAgainError(f"{run_name(paths)}: another command has just started it; it stays")
        aside = paths.folder.with_name(f".{paths.folder.name}.removed-{os.getpid()}")
        paths.folder.rename(aside)
    except BaseException:
        shutil.rmtree(paths.attempt(number).folder, ignore_errors=True)
        raise
    shutil.rmtree(aside)


def _size(folder: Path) -> str:
    total = sum(path.lstat().st_size for path in folder.rglob("*"))
    return f"{total / 1e6:.1f} MB"


def _agreed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm: nobody is there to ask; add --yes")
    what = "this run" if count == 1 else f"these {count} runs"
    question = f"Remove {what} with all checkpoints and logs, and code that no run uses then? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
