"""``clean``: removes what a run no longer needs, after listing it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.recovery.history import current_status
from hpc_train.run import checkpoints
from hpc_train.run.attempts import newest_number, no_claims
from hpc_train.run.code.unused_snapshots import unused_snapshots
from hpc_train.run.files import remove_folder
from hpc_train.run.find import find_runs, run_name
from hpc_train.run.liveness import lives, newest_record
from hpc_train.run.run_status import GOING_ON


class LivingRunError(UserError):
    """The run still writes to its folder."""


@dataclass(frozen=True)
class _Surplus:
    path: Path
    why: str

    def size_bytes(self) -> int:
        if self.path.is_symlink() or not self.path.is_dir():
            return self.path.lstat().st_size
        return sum(file.lstat().st_size for file in self.path.rglob("*"))


def clean(words: Sequence[str], *, yes: bool) -> ExitCode:
    """List what would be removed, ask unless ``yes``, remove it. Refuses if any of the runs is still
    active.
    """
    runs = find_runs(words)
    for paths in runs:
        _refuse_living(paths)
    attempts = {paths: newest_number(paths) for paths in runs}
    surplus = {paths: _surplus(paths) for paths in runs}
    for paths, found in surplus.items():
        _say(found)
        if not found:
            say(f"{paths.folder}: nothing to remove")
    folders = {paths.siblings.snapshots for paths in runs}
    code = [_Surplus(path, "code that no run uses") for folder in folders for path in _unused(folder)]
    _say(code)
    if not code and not any(surplus.values()):
        return ExitCode.DONE
    if not yes and not _agreed():
        say("nothing was removed")
        return ExitCode.DONE
    for paths, found in surplus.items():
        with no_claims(paths):
            _refuse_living(paths)  # the answer may have taken an hour
            if newest_number(paths) != attempts[paths]:
                raise LivingRunError(f"{run_name(paths)} was resumed in the meantime; run clean again")
            for item in found:
                _remove(item.path)
    _remove_code(folders, code)
    return ExitCode.DONE


def _say(found: Sequence[_Surplus]) -> None:
    for item in found:
        say(f"{item.path}  {item.size_bytes() / 1e6:.1f} MB  {item.why}")


def _refuse_living(paths: RunPaths) -> None:
    record = newest_record(paths)
    state = current_status(paths).state
    if state in GOING_ON or (record is not None and lives(paths, record) is not False):
        raise LivingRunError(f"{run_name(paths)} is {state}; clean it once it has ended")


def _surplus(paths: RunPaths) -> list[_Surplus]:
    """Return what hpc-train wrote and the run no longer needs; targets of links are kept."""
    found = [_Surplus(paths.cache, "cache")] if paths.cache.exists() else []
    if not paths.checkpoints.is_dir() or paths.checkpoints.is_symlink():
        return found
    newest = next((each for each in checkpoints.committed(paths) if not checkpoints.verify(each)), None)
    best = checkpoints.kept_best(paths)
    kept = [] if newest is None else [newest.folder, *([paths.checkpoint(best.step).folder] if best else [])]
    folders = {checkpoint.folder for checkpoint in paths.checkpoint_folders()}
    for path in sorted(paths.checkpoints.glob("step-*")):
        is_set_aside = checkpoints.is_set_aside(path)
        if checkpoints.is_left_over(path):
            found.append(_Surplus(path, "not finished"))
        elif not is_set_aside and (path not in folders or path.is_symlink() or not path.is_dir()):
            continue
        # Without an intact one it is unknown which of them the user may want to repair.
        elif newest is not None and path not in kept:
            older = f"older than {newest.folder.name}, or does not count"
            found.append(_Surplus(path, "damaged, set aside" if is_set_aside else older))
    return found


def _unused(snapshots: Path) -> list[Path]:
    try:
        return unused_snapshots(snapshots)
    except OSError as error:
        why = f"{error.filename or 'a run'} can't be read: {error.strerror or error}"
        say(f"{snapshots}: kept, since {why}")
        return []


def remove_unused_code(snapshots: Path) -> None:
    """Remove code that no run uses, and list it; a submit may have started using it meanwhile."""
    for path in _unused(snapshots):
        remove_folder(path)
        say(f"{path}  removed: code that no run uses")


def _remove_code(folders: Collection[Path], announced: Sequence[_Surplus]) -> None:
    """Remove what was listed and is still unused: a submit may have started using it since."""
    unused = {path for folder in folders for path in _unused(folder)}
    for item in announced:
        if item.path in unused:
            remove_folder(item.path)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clean: no terminal to ask for confirmation; add --yes")
    print("Remove all of it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.parent.name == "checkpoints":
        checkpoints.remove(path)
    else:
        shutil.rmtree(path)
