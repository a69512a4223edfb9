"""``clean``: removes what a run does not need any more, after saying what."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.printing import say
from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.run_folder import checkpoints
from hpc_train.run_folder.attempts import no_claims
from hpc_train.run_folder.files import remove_folder
from hpc_train.run_folder.finding import find_runs, run_name
from hpc_train.run_folder.liveness import lives, newest_record
from hpc_train.run_folder.status import GOING_ON, current_status
from hpc_train.run_folder.unused_code import unused_snapshots


class LivingRunError(UserError):
    """The run still writes into its folder."""


@dataclass(frozen=True)
class _Surplus:
    path: Path
    why: str

    def size_bytes(self) -> int:
        if self.path.is_symlink() or not self.path.is_dir():
            return self.path.lstat().st_size
        return sum(file.lstat().st_size for file in self.path.rglob("*"))


def clean(words: Sequence[str], *, yes: bool) -> ExitCode:
    """Say what would go, ask unless ``yes``, remove it. Refuses where any of the runs still goes on."""
    runs = find_runs(words)
    for paths in runs:
        _refuse_living(paths)
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
    """Return what hpc-train wrote and the run does not need any more; what links lead to stays."""
    found = [_Surplus(paths.cache, "cache")] if paths.cache.exists() else []
    if not paths.checkpoints.is_dir() or paths.checkpoints.is_symlink():
        return found
    newest = next((each for each in checkpoints.committed(paths) if not checkpoints.verify(each)), None)
    folders = {checkpoint.folder for checkpoint in paths.checkpoint_folders()}
    for path in sorted(paths.checkpoints.glob("step-*")):
        is_set_aside = checkpoints.is_set_aside(path)
        if checkpoints.is_left_over(path):
            found.append(_Surplus(path, "not finished"))
        elif not is_set_aside and (path not in folders or path.is_symlink() or not path.is_dir()):
            continue
        # Without a whole one nothing says which of them somebody may want to mend.
        elif newest is not None and path != newest.folder:
            older = f"older than {newest.folder.name}, or does not count"
            found.append(_Surplus(path, "damaged, set aside" if is_set_aside else older))
    return found


def _unused(snapshots: Path) -> list[Path]:
    try:
        return unused_snapshots(snapshots)
    except OSError as error:
        why = f"{error.filename or 'a run'} can't be read: {error.strerror or error}"
        say(f"{snapshots}: left alone, for {why}")
        return []


def remove_unused_code(snapshots: Path) -> None:
    """Remove the code that no run uses, and say which; a submit may have come for what is new."""
    for path in _unused(snapshots):
        remove_folder(path)
        say(f"{path}  removed: code that no run uses")


def _remove_code(folders: Collection[Path], told: Sequence[_Surplus]) -> None:
    """Remove of what was told what is unused still: a submit may have come for it since."""
    unused = {path for folder in folders for path in _unused(folder)}
    for item in told:
        if item.path in unused:
            remove_folder(item.path)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clean: nobody is there to ask; add --yes")
    print("Remove all of it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.parent.name == "checkpoints":
        checkpoints.remove(path)
    else:
        shutil.rmtree(path)
