"""The folder in which a run's program works: ``work`` in the run's folder.

It looks like the folder of ``submit``: files of the run's snapshot are copied, since scripts may change them
or write beside them; entries that the snapshot does not have, such as data, are links to the folder of
``submit``. New files and ``program.outputs`` are the run's own and are kept over attempts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.code import snapshot
from hpc_train.run.files import read_json, write_text

#: Never linked: the repository's own files, caches.
_SKIPPED = {".git", "__pycache__"}
#: In the working folder: the name of the snapshot whose files were copied.
_MARK = ".hpc-train-code"


def make(paths: RunPaths, outputs: Sequence[str]) -> Path:
    """Create or renew the working folder; return the folder in which the program starts.

    Called by one process per attempt, before any program starts. Files that a program has written or changed
    stay, except that another snapshot (`resume --code new`) replaces the files of the earlier one.
    """
    code, work = snapshot.linked(paths), paths.work
    start = work / (snapshot.folder_in_tree(code) if code is not None else "")
    start.mkdir(mode=0o700, parents=True, exist_ok=True)
    excluded = {start / output for output in outputs}
    mark = work / _MARK
    if code is not None and (not mark.is_file() or mark.read_text(encoding="utf-8") != code.name):
        _copy_files(code / snapshot.TREE, work, excluded)
        write_text(mark, code.name)
    origin = ((read_json(paths.run) or {}).get("code") or {}).get("folder")
    if isinstance(origin, str):
        _link_entries(Path(origin), start, excluded)
    for output in excluded:
        # A name with a suffix is a file: its folder is made.
        (output.parent if output.suffix else output).mkdir(parents=True, exist_ok=True)
    return start


def _copy_files(tree: Path, work: Path, excluded: set[Path]) -> None:
    for parent, folders, files in os.walk(tree):
        target = work / Path(parent).relative_to(tree)
        folders[:] = [name for name in folders if name not in _SKIPPED and target / name not in excluded]
        target.mkdir(exist_ok=True)
        for name in files:
            copy = target / name
            if copy in excluded:
                continue
            copy.unlink(missing_ok=True)
            shutil.copy2(Path(parent, name), copy, follow_symlinks=False)
            if not copy.is_symlink():
                copy.chmod(copy.stat().st_mode | 0o600)


def _link_entries(origin: Path, folder: Path, excluded: set[Path]) -> None:
    """Link the entries that the snapshot does not have; folders that both have are merged."""
    with suppress(OSError), os.scandir(origin) as entries:
        for entry in entries:
            target = folder / entry.name
            if entry.name in _SKIPPED or target in excluded or Path(entry.path) == runs_root():
                continue
            if not os.path.lexists(target):
                target.symlink_to(entry.path)
            elif entry.is_dir(follow_symlinks=False) and target.is_dir() and not target.is_symlink():
                _link_entries(Path(entry.path), target, excluded)
