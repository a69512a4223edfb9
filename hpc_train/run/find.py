"""Resolves RUN arguments to run folders: an id, the start of one, ``name/id``, ``latest``, a folder, or an
experiment's name.

``run_name`` is the inverse: every command prints a run by a name that every command accepts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.console import columns
from hpc_train.errors import StorageError, UsageError, counted
from hpc_train.paths import RunPaths, expanded, runs_root
from hpc_train.registry import nearest
from hpc_train.run.files import read_json
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import read_status

_ANY_RUN = RunPaths(Path())
#: The files that identify a run's folder.
_FILES = (_ANY_RUN.run.name, _ANY_RUN.experiment.name)
#: Name in a run's folder → the access that its readers need.
_NEEDED = {path.name: os.R_OK | os.X_OK for path in (_ANY_RUN.attempts, _ANY_RUN.checkpoints)} | {
    path.name: os.R_OK for path in (_ANY_RUN.run, _ANY_RUN.experiment, _ANY_RUN.status)
}
#: ``latest``, ``latest-1`` and ``-1``: the run that started last; ``latest-2`` and ``-2``: the one before.
_LATEST = re.compile(r"(?:latest)?-([1-9]\d{0,5})|latest")
#: The key ``name`` of an experiment file.
_NAME = re.compile(r"""^["']?name["']?:\s*["']?([\w.-]+)""", re.MULTILINE)
#: Number of runs that a message lists.
_LISTED = 20


@dataclass(frozen=True)
class _Known:
    #: Job's name → run id → its folder.
    runs: dict[str, dict[str, RunPaths]]
    #: Experiments and runs that this user has no permission to read.
    hidden: list[Path]

    @classmethod
    def below(cls, root: Path) -> _Known:
        folders = cls({}, [])
        for experiment in folders_in(root):
            if not _may(experiment, os.R_OK | os.X_OK):
                folders.hidden.append(experiment)
            runs = folders.runs.setdefault(experiment.name, {})
            for paths in map(RunPaths, folders_in(experiment)):
                if not is_readable(paths):
                    folders.hidden.append(paths.folder)
                elif _has_files(paths):
                    runs[paths.folder.name] = paths
        return folders

    def find(self, names: Sequence[str]) -> list[RunPaths]:
        if not names:
            return [paths for runs in self.runs.values() for paths in runs.values()]
        matches = [paths for word in names for paths in _meant(word, self)]
        return list(dict.fromkeys(matches))

    def unreadable(self, names: Sequence[str]) -> list[Path]:
        wanted = set(names)
        if not wanted:
            return self.hidden
        return [path for path in self.hidden if wanted & {*path.parts[-2:], "/".join(path.parts[-2:])}]


def find_runs(names: Sequence[str]) -> list[RunPaths]:
    """Return the runs that the words name, without duplicates; without words all below the runs folder.

    Raises UsageError if a word names no run, or several experiments have a run of that id.
    """
    return _Known.below(runs_root()).find(names)


def find_and_skip(names: Sequence[str]) -> tuple[list[RunPaths], list[Path]]:
    """Return ``find_runs`` of the words, and those of them (without words: all) that can't be read."""
    folders = _Known.below(runs_root())
    return folders.find(names), folders.unreadable(names)


def run_name(paths: RunPaths) -> str:
    """Return the shortest name by which every command finds the run.

    Its id; ``name/id`` if several experiments have that id; its folder if it is outside the runs folder.
    """
    root, run_id = runs_root(), paths.folder.name
    if paths.siblings.folder.parent != root:
        return str(paths.folder)
    others = (experiment for experiment in folders_in(root) if experiment.name != paths.siblings.folder.name)
    is_ambiguous = any(is_run(RunPaths(other / run_id)) for other in others)
    return name_with_experiment(paths) if is_ambiguous else run_id


def run_names(runs: Sequence[RunPaths]) -> dict[RunPaths, str]:
    """Return ``run_name`` of many runs; each experiment's folder is read once."""
    root = runs_root()
    counts = Counter(run_id for experiment in _names(root) for run_id in _names(root / experiment))
    return {paths: _name_among(paths, root, counts) for paths in runs}


def names_of(runs: Sequence[RunPaths]) -> list[str]:
    """Return words that name these runs of one experiment: its name if they are all of its runs."""
    experiment = runs[0].siblings.folder
    others = {RunPaths(folder) for folder in folders_in(experiment)} - set(runs)
    if len(runs) > 1 and experiment.parent == runs_root() and not any(map(is_run, others)):
        return [experiment.name]
    return list(run_names(runs).values())


def _name_among(paths: RunPaths, root: Path, counts: Mapping[str, int]) -> str:
    if paths.folder.parent.parent != root:
        return str(paths.folder)
    return paths.folder.name if counts[paths.folder.name] == 1 else name_with_experiment(paths)


def name_with_experiment(paths: RunPaths) -> str:
    """Return ``name/id`` of the run."""
    return f"{paths.siblings.folder.name}/{paths.folder.name}"


def folders_in(parent: Path) -> list[Path]:
    """Return the folders in ``parent``, sorted; none if it can't be read."""
    return [parent / name for name in _names(parent)]


def _names(parent: Path) -> list[str]:
    """Return the sorted names of the folders in ``parent``; hidden ones are runs that are being created."""
    try:
        with os.scandir(parent) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def is_run(paths: RunPaths) -> bool:
    """Return True if this is a run's folder that the user may read."""
    return _has_files(paths) and is_readable(paths)


def _has_files(paths: RunPaths) -> bool:
    folder = str(paths.folder)
    return all(os.path.isfile(f"{folder}/{name}") for name in _FILES)  # noqa: PTH113  (of each run)


def is_readable(paths: RunPaths) -> bool:
    """Return True if this user may read the run's own files; ranks' logs and checkpoints are not checked."""
    folder = str(paths.folder)
    if not _may(folder, os.R_OK | os.X_OK):
        return False
    return all(_may(f"{folder}/{name}", mode) for name, mode in _NEEDED.items())


def _may(path: Path | str, mode: int) -> bool:
    if os.access(path, mode, effective_ids=True):
        return True
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except PermissionError:
        pass
    return False


def _meant(word: str, folders: _Known) -> list[RunPaths]:
    experiment, slash, run_id = word.partition("/")
    if run_id in folders.runs.get(experiment, {}):
        return [folders.runs[experiment][run_id]]
    ids = [runs[word] for runs in folders.runs.values() if word in runs]
    if len(ids) > 1:
        raise UsageError(_ambiguous(f"{word}: several experiments have a run of this id", ids))
    if ids:
        return ids
    if folders.runs.get(word):
        return list(folders.runs[word].values())
    latest = _LATEST.fullmatch(run_id if slash else word)
    if latest is None and (word in {".", ".."} or Path(word).is_absolute() or Path(word).is_dir()):
        return _in_folder(word, folders)
    runs = list(folders.runs.get(experiment, {}).values()) if slash else folders.find(())
    if latest is not None:
        return [_latest(word, runs, int(latest[1] or 1))]
    start = run_id if slash else word
    ids = [run for run in runs if run.folder.name.startswith(start)] if start else []
    if len(ids) > 1:
        text = f"{word}: {counted(len(ids), 'run')} have an id that starts like this"
        raise UsageError(_ambiguous(text, ids))
    if ids:
        return ids
    if slash:
        return _in_folder(word, folders)
    raise UsageError(f"{word}: no run or experiment of this name below {runs_root()}; {_hint(word, folders)}")


def _latest(word: str, runs: Sequence[RunPaths], place: int) -> RunPaths:
    if place > len(runs):
        there = f"there are only {counted(len(runs), 'run')}" if runs else "there are no runs yet"
        raise UsageError(f"{word}: {there} below {runs_root()}; `hpc-train submit FILE` starts some")
    return sorted(runs, key=started, reverse=True)[place - 1]


def started(paths: RunPaths) -> tuple[str, int]:
    """Return a key that sorts runs by the second in which they started, then by when they were created.

    A run's newest attempt counts; of a run without one, its creation.
    """
    record = newest_record(paths)
    start = record.start if record else str((read_json(paths.run) or {}).get("created"))
    return start, paths.experiment.stat().st_mtime_ns


def _ambiguous(text: str, runs: Sequence[RunPaths]) -> str:
    names = run_names(runs)
    rows = [[names[run], run.siblings.folder.name, read_status(run).state] for run in runs[:_LISTED]]
    more = [f"  and {len(runs) - _LISTED} more"] if len(runs) > _LISTED else []
    return "\n".join([f"{text}; write one of:", *(f"  {line}" for line in columns(rows)), *more])


def _in_folder(word: str, folders: _Known) -> list[RunPaths]:
    folder = Path(os.path.abspath(expanded(word)))  # noqa: PTH100  (".." goes, links stay as typed)
    if is_run(RunPaths(folder)):
        return [RunPaths(folder)]
    matches = [paths for paths in map(RunPaths, folders_in(folder)) if is_run(paths)]
    if not matches:
        hidden = folders.unreadable([word]) if is_readable(RunPaths(folder)) else [folder]
        if hidden:
            raise UsageError(f"{word}: {_hidden(hidden[0])}")
        what = "contains no run" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{folder}: {what}; give a run id, a run's folder, or an experiment's name")
    return matches


def _hint(word: str, folders: _Known) -> str:
    names = [*folders.runs, *(run_id for runs in folders.runs.values() for run_id in runs)]
    if hidden := folders.unreadable([word]):
        return _hidden(hidden[0])
    if (file := Path(word)).suffix in {".yaml", ".yml"} and file.is_file():
        return _of_file(file, folders)
    if close := nearest(word, names):
        return f"did you mean {close}?"
    return "`hpc-train status` lists them" if names else "there are no runs yet"


def _of_file(file: Path, folders: _Known) -> str:
    """Return the answer to an experiment file where a run is expected: its experiment's name."""
    name = _NAME.search(file.read_text(encoding="utf-8", errors="replace"))
    experiment = name[1] if name else file.stem
    if experiment in folders.runs:
        return f"it is a file, whose runs have the experiment's name; write {experiment}"
    return f"it is a file, of which there is no run yet; `hpc-train submit {file}` starts it"


def _hidden(path: Path) -> str:
    return f"{path} exists, but you may not read it"


def refuse_target(target: Path) -> None:
    """Raise UserError if ``target`` can't be written, or it exists and is not a regular file.

    StorageError if its folder is missing, or it is a link, a folder or a device; UsageError if it is inside a
    run's folder.
    """
    if not target.parent.is_dir():
        raise StorageError(f"{target}: there is no folder {target.parent}; make the folder first")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise StorageError(f"{target}: exists and is not a plain file; give the name of a file to write")
    real = target.parent.resolve()
    for folder in (real, *real.parents):
        if is_run(RunPaths(folder)):
            raise UsageError(f"-o: {target} is inside run folder {folder}; write the file outside of it")
