"""Resolves RUN arguments to run folders: an id, ``name/id``, a folder, or an experiment's name.

``run_name`` is the inverse: every command prints a run by a name that every command accepts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.errors import UsageError
from hpc_train.paths import RunPaths, runs_root
from hpc_train.registry import nearest

#: Experiment's name → run id → its folder.
_Runs = dict[str, dict[str, RunPaths]]


def find_runs(words: Sequence[str]) -> list[RunPaths]:
    """Return the runs that the words name, without duplicates; without words all below the runs folder.

    Raises UsageError if a word names no run, or several experiments have a run of that id.
    """
    known = _known_runs(runs_root())
    if not words:
        return [paths for runs in known.values() for paths in runs.values()]
    found = [paths for word in words for paths in _meant(word, known)]
    return list(dict.fromkeys(found))


def run_name(paths: RunPaths) -> str:
    """Return the shortest name by which every command finds the run.

    Its id; ``name/id`` if several experiments have that id; its folder if it is outside the runs folder.
    """
    root, run_id = runs_root(), paths.folder.name
    if paths.siblings.folder.parent != root:
        return str(paths.folder)
    others = (each for each in _folders(root) if each.name != paths.siblings.folder.name)
    is_ambiguous = any(is_run(RunPaths(other / run_id)) for other in others)
    return _with_experiment(paths) if is_ambiguous else run_id


def run_names(runs: Sequence[RunPaths]) -> dict[RunPaths, str]:
    """Return ``run_name`` of many runs; each experiment's folder is read once."""
    root = runs_root()
    known = {experiment.name: {path.name for path in _folders(experiment)} for experiment in _folders(root)}
    counts = Counter(run_id for ids in known.values() for run_id in ids)
    return {paths: _name_among(paths, root, counts) for paths in runs}


def _name_among(paths: RunPaths, root: Path, counts: Mapping[str, int]) -> str:
    if paths.siblings.folder.parent != root:
        return str(paths.folder)
    return paths.folder.name if counts[paths.folder.name] == 1 else _with_experiment(paths)


def _with_experiment(paths: RunPaths) -> str:
    return f"{paths.siblings.folder.name}/{paths.folder.name}"


def _known_runs(root: Path) -> _Runs:
    return {experiment.name: _runs_in(experiment) for experiment in _folders(root)}


def _runs_in(experiment: Path) -> dict[str, RunPaths]:
    found = {folder.name: RunPaths(folder) for folder in _folders(experiment)}
    return {run_id: paths for run_id, paths in found.items() if is_run(paths)}


def _folders(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` by name; hidden ones are runs that are being created."""
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def is_run(paths: RunPaths) -> bool:
    """Tell whether this is a run's folder that the user may read."""
    try:
        is_there = paths.run.is_file() and paths.experiment.is_file()
    except PermissionError:
        return False
    return is_there and is_readable(paths)


def is_readable(paths: RunPaths) -> bool:
    """Tell whether this user may read the run's own files; ranks' logs and checkpoints are not checked."""
    folders, files = (
        (paths.folder, paths.attempts, paths.checkpoints),
        (paths.run, paths.experiment, paths.status),
    )
    may_enter = all(_may(folder, os.R_OK | os.X_OK) for folder in folders)
    return may_enter and all(_may(file, os.R_OK) for file in files)


def unreadable(words: Sequence[str]) -> list[Path]:
    """Return the experiments and runs below the runs folder that this user may not read.

    Of those that ``words`` mean; without words all.
    """
    found = []
    for experiment in _folders(runs_root()):
        if not _may(experiment, os.R_OK | os.X_OK):
            found.append(experiment)
        found += [folder for folder in _folders(experiment) if not is_readable(RunPaths(folder))]
    names = {path: {path.name, path.parent.name, f"{path.parent.name}/{path.name}"} for path in found}
    return [path for path in found if not words or names[path] & set(words)]


def _may(path: Path, mode: int) -> bool:
    """Tell whether this process's effective user may access an existing file in this way."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    return os.access(path, mode, effective_ids=True)


def _meant(word: str, known: _Runs) -> list[RunPaths]:
    name, _, run_id = word.partition("/")
    if run_id in known.get(name, {}):
        return [known[name][run_id]]
    if os.sep in word or word in {".", ".."}:
        return _in_folder(word)
    ids = [runs[word] for runs in known.values() if word in runs]
    if len(ids) > 1:
        listed = "\n".join(f"  {run_name(paths)}" for paths in ids)
        raise UsageError(f"{word}: several experiments have a run of this id; write one of:\n{listed}")
    if ids:
        return ids
    if known.get(word):
        return list(known[word].values())
    if Path(word).is_dir():
        return _in_folder(word)
    raise UsageError(f"{word}: no run or experiment of this name below {runs_root()}; {_hint(word, known)}")


def _in_folder(word: str) -> list[RunPaths]:
    """Return the run of the folder, or the runs in it."""
    folder = Path(os.path.abspath(Path(word).expanduser()))  # noqa: PTH100  (".." goes, links stay as typed)
    if is_run(RunPaths(folder)):
        return [RunPaths(folder)]
    found = list(_runs_in(folder).values())
    if not found:
        hidden = unreadable([word]) if is_readable(RunPaths(folder)) else [folder]
        if hidden:
            raise UsageError(f"{word}: {_hidden(hidden[0])}")
        what = "contains no run" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{folder}: {what}; give a run id, a run's folder, or an experiment's name")
    return found


def _hint(word: str, known: _Runs) -> str:
    names = [*known, *(run_id for runs in known.values() for run_id in runs)]
    if hidden := unreadable([word]):
        return _hidden(hidden[0])
    if close := nearest(word, names):
        return f"did you mean {close}?"
    return "`hpc-train status` lists them" if names else "there are no runs yet"


def _hidden(path: Path) -> str:
    return f"{path} exists, but you may not read it"
