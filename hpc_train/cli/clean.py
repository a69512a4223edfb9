"""``clean``: lists, then removes, files that a run no longer needs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.console import JSON_VERSION, put_json, say
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

UNUSED_CODE = "code that no run uses"


class LivingRunError(UserError):
    """The run still writes to its folder."""


@dataclass(frozen=True)
class Surplus:
    """A file or folder to remove, and why."""

    path: Path
    why: str

    @cached_property
    def size_bytes(self) -> int:
        """The size when it was first read."""
        return size_bytes(self.path)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in the JSON output of ``clean`` and ``remove``."""
        return {"path": str(self.path.absolute()), "bytes": self.size_bytes, "why": self.why}


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*"))


def clean(names_or_ids: Sequence[str], *, yes: bool, as_json: bool = False) -> ExitCode:
    """List and remove the items, after confirmation unless ``yes``. Refuses if any run is still active."""
    removed, code = _clean(names_or_ids, yes=yes)
    if as_json:
        items = [*code, *(item for items_of_run in removed.values() for item in items_of_run)]
        put_json(
            {
                "version": JSON_VERSION,
                "runs": [_to_json(paths, items_of_run) for paths, items_of_run in removed.items()],
                "code": [item.to_json() for item in code],
                "bytes": sum(item.size_bytes for item in items),
            }
        )
    return ExitCode.DONE


def _to_json(paths: RunPaths, removed: Sequence[Surplus]) -> dict[str, Any]:
    return {
        "id": paths.folder.name,
        "name": paths.siblings.folder.name,
        "path": str(paths.folder.absolute()),
        "removed": [item.to_json() for item in removed],
        "checkpoints": [str(checkpoint.folder.absolute()) for checkpoint in paths.checkpoint_folders()],
    }


def _clean(names_or_ids: Sequence[str], *, yes: bool) -> tuple[dict[RunPaths, list[Surplus]], list[Surplus]]:
    """Return the removed items of each run, and of the code."""
    runs = find_runs(names_or_ids)
    for paths in runs:
        _refuse_living(paths)
    attempts = {paths: newest_number(paths) for paths in runs}
    surplus = {paths: _surplus(paths) for paths in runs}
    for paths, items in surplus.items():
        _say(items)
        if not items:
            say(f"{paths.folder}: nothing to remove")
    folders = {paths.siblings.snapshots for paths in runs}
    code = [Surplus(path, UNUSED_CODE) for folder in folders for path in _unused(folder)]
    _say(code)
    if not code and not any(surplus.values()):
        return surplus, []
    if not yes and not _agreed():
        say("nothing was removed")
        return {paths: [] for paths in runs}, []
    for paths, items in surplus.items():
        with no_claims(paths):
            _refuse_living(paths)  # the answer may have taken an hour
            if newest_number(paths) != attempts[paths]:
                raise LivingRunError(f"{run_name(paths)} was resumed in the meantime; run clean again")
            for item in items:
                _remove(item.path)
    return surplus, _remove_code(folders, code)


def _say(items: Sequence[Surplus]) -> None:
    for item in items:
        say(f"{item.path}  {item.size_bytes / 1e6:.1f} MB  {item.why}")


def _refuse_living(paths: RunPaths) -> None:
    record = newest_record(paths)
    state = current_status(paths).state
    if state in GOING_ON or (record is not None and lives(paths, record) is not False):
        raise LivingRunError(f"{run_name(paths)} is {state}; clean it once it has ended")


def _surplus(paths: RunPaths) -> list[Surplus]:
    """Return the files of hpc-train that the run no longer needs; targets of links are kept."""
    surplus = [Surplus(paths.cache, "cache")] if paths.cache.exists() else []
    if not paths.checkpoints.is_dir() or paths.checkpoints.is_symlink():
        return surplus
    newest = next((saved for saved in checkpoints.committed(paths) if not checkpoints.verify(saved)), None)
    best = checkpoints.kept_best(paths)
    needed = [] if newest is None else [newest.folder]
    if newest is not None and best is not None:
        needed.append(paths.checkpoint(best.step).folder)
    folders = {checkpoint.folder for checkpoint in paths.checkpoint_folders()}
    for path in sorted(paths.checkpoints.glob("step-*")):
        is_set_aside = checkpoints.is_set_aside(path)
        if checkpoints.is_left_over(path):
            surplus.append(Surplus(path, "not finished"))
        elif not is_set_aside and (path not in folders or path.is_symlink() or not path.is_dir()):
            continue
        # Without an intact one, the user may want to repair any of them.
        elif newest is not None and path not in needed:
            reason = "damaged, set aside" if is_set_aside else _why(paths, path, newest.folder)
            surplus.append(Surplus(path, reason))
    return surplus


def _why(paths: RunPaths, path: Path, newest: Path) -> str:
    """Return why a checkpoint is not needed in addition to ``newest``, the newest intact and valid one."""
    if path.name < newest.name:
        return f"older than {newest.name}"
    counting = (*checkpoints.committed(paths), *checkpoints.damaged(paths))
    if path in [each.folder for each in counting]:
        return "damaged"
    return "does not count: its attempt no longer owned the run"


def _unused(snapshots: Path) -> list[Path]:
    try:
        return unused_snapshots(snapshots)
    except OSError as error:
        why = f"{error.filename or 'a run'} can't be read: {error.strerror or error}"
        say(f"{snapshots}: kept, since {why}")
        return []


def remove_unused_code(snapshots: Path) -> Iterator[Surplus]:
    """Remove code that no run uses, and list it; a submit may have started using it meanwhile."""
    for path in _unused(snapshots):
        item = Surplus(path, UNUSED_CODE)
        _ = item.size_bytes  # while the folder exists
        remove_folder(path)
        say(f"{path}  removed: {UNUSED_CODE}")
        yield item


def _remove_code(folders: Collection[Path], announced: Sequence[Surplus]) -> list[Surplus]:
    """Remove the listed items that are still unused: a submit may have started using some since."""
    unused = {path for folder in folders for path in _unused(folder)}
    removed = [item for item in announced if item.path in unused]
    for item in removed:
        remove_folder(item.path)
    return removed


def _agreed() -> bool:
    return confirmed("clean", "Remove all of it?")


def confirmed(command: str, question: str) -> bool:
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
