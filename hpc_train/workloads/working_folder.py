"""The folder of a run in which its program works: files of the snapshot, its own outputs, links to the rest.

Rank 0 of each attempt makes or renews it (``supervisor``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from glob import escape
from pathlib import Path, PurePosixPath

from hpc_train.experiment.config.program_section import ProgramConfig
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run import files
from hpc_train.run.code import snapshot

#: Never linked into the working folder: the repository's own files, caches.
_SKIPPED = {".git", "__pycache__"}
#: In the working folder: the name of the snapshot whose files were copied.
_MARK = ".hpc-train-code"


def make_working_folder(paths: RunPaths, program: ProgramConfig) -> Path:
    """Create or renew ``work`` in the run's folder; return the folder in which the program starts.

    It looks like the folder of ``submit``: files of the run's snapshot are copied, since scripts may change
    them or write beside them; entries that the snapshot does not have, such as data, are links to the folder
    of ``submit``. New files and paths that the program writes are the run's own and are kept over attempts,
    as are files that a program has changed, until another snapshot (`resume --code new`) replaces them.
    """
    code, work = snapshot.linked(paths), paths.work
    inner = snapshot.folder_in_tree(code) if code is not None else ""
    start = work / inner
    start.mkdir(mode=0o700, parents=True, exist_ok=True)
    places = _Places(program, start, None if code is None else code / snapshot.TREE / inner)
    mark = work / _MARK
    if code is not None and (not mark.is_file() or mark.read_text(encoding="utf-8") != code.name):
        _copy_files(code / snapshot.TREE, work, places)
        files.write_text(mark, code.name)
    origin = ((files.read_json(paths.run) or {}).get("code") or {}).get("folder")
    if isinstance(origin, str):
        _link_entries(Path(origin), start, places)
    for output in map(start.joinpath, program.outputs):
        # A name with a suffix is a file: its folder is made.
        (output.parent if output.suffix else output).mkdir(parents=True, exist_ok=True)
    return start


class _Places:
    """The origin of each path in the working folder.

    The run's own are ``outputs``, the program's checkpoint, the file of its metrics, and the folders of both
    unless these contain code. ``code``: the snapshot's folder that corresponds to ``start``.
    """

    def __init__(self, program: ProgramConfig, start: Path, code: Path | None) -> None:
        self._start, self._code = start, code
        patterns = [escape(path) for path in program.outputs]
        written = [program.resume.if_exists] if program.resume else []
        written += [escape(program.metrics.jsonl)] if program.metrics and program.metrics.jsonl else []
        for pattern in written:
            folder = next(str(parent) for parent in PurePosixPath(pattern).parents if "*" not in str(parent))
            patterns.append(pattern if folder == "." or self.has_code(start / folder) else folder)
        self._own = [PurePosixPath("/", pattern) for pattern in patterns]

    def has_code(self, path: Path) -> bool:
        """Return True if the snapshot has the folder."""
        return self._code is not None and (self._code / os.path.relpath(path, self._start)).is_dir()

    def is_own(self, path: Path) -> bool:
        """Return True if the program writes there."""
        return self._matches(path, self._own)

    def is_above_own(self, path: Path) -> bool:
        """Return True if the program may write below the folder."""
        return self._matches(path, [parent for pattern in self._own for parent in pattern.parents])

    def _matches(self, path: Path, patterns: Iterable[PurePosixPath]) -> bool:
        inner = PurePosixPath("/", os.path.relpath(path, self._start))
        return any(inner.match(str(pattern)) for pattern in patterns)


def _copy_files(tree: Path, work: Path, places: _Places) -> None:
    for parent, folders, names in os.walk(tree):
        target = work / Path(parent).relative_to(tree)
        folders[:] = [name for name in folders if name not in _SKIPPED and not places.is_own(target / name)]
        target.mkdir(exist_ok=True)
        for name in names:
            copy = target / name
            if places.is_own(copy):
                continue
            copy.unlink(missing_ok=True)
            shutil.copy2(Path(parent, name), copy, follow_symlinks=False)
            if not copy.is_symlink():
                copy.chmod(copy.stat().st_mode | 0o600)


def _link_entries(origin: Path, folder: Path, places: _Places) -> None:
    """Link the entries that the snapshot does not have. Folders that it has are merged, and so are those in
    which the program writes; folders that the program has made are left alone.
    """
    with suppress(OSError), os.scandir(origin) as entries:
        for entry in entries:
            target, path = folder / entry.name, Path(entry.path)
            if entry.name in _SKIPPED or places.is_own(target) or path == runs_root():
                continue
            is_above, is_new = places.is_above_own(target) and entry.is_dir(), not os.path.lexists(target)
            if is_new and not is_above:
                target.symlink_to(path)
                continue
            if is_new:
                target.mkdir()
            is_merged = is_above or (entry.is_dir(follow_symlinks=False) and places.has_code(target))
            if is_merged and target.is_dir() and not target.is_symlink():
                _link_entries(path, target, places)
