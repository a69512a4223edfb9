"""What a person types for RUN → run folders: an id, a folder, or an experiment's name (DESIGN §5)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import UsageError
from hpc_train.paths import RunPaths, runs_root
from hpc_train.registry import nearest

#: Experiment's name → run id → its folder.
_Runs = dict[str, dict[str, RunPaths]]


def find_runs(words: Sequence[str]) -> list[RunPaths]:
    """Return the runs that are meant, each once; without words all below the runs folder.

    Raises UsageError where a word means no run, or an id is one of several experiments.
    """
    known = _known_runs(runs_root())
    if not words:
        return [paths for runs in known.values() for paths in runs.values()]
    found = [paths for word in words for paths in _meant(word, known)]
    return list(dict.fromkeys(found))


def _known_runs(root: Path) -> _Runs:
    return {experiment.name: _runs_in(experiment) for experiment in _folders(root)}


def _runs_in(experiment: Path) -> dict[str, RunPaths]:
    found = {folder.name: RunPaths(folder) for folder in _folders(experiment)}
    return {run_id: paths for run_id, paths in found.items() if is_run(paths)}


def _folders(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` by name; hidden ones are runs that are only being made."""
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def is_run(paths: RunPaths) -> bool:
    """Tell whether the folder is a run's."""
    return paths.run.is_file() and paths.experiment.is_file()


def _meant(word: str, known: _Runs) -> list[RunPaths]:
    if os.sep in word or word in {".", ".."}:
        return _in_folder(Path(word))
    ids = [runs[word] for runs in known.values() if word in runs]
    if len(ids) > 1:
        listed = "\n".join(f"  {paths.folder}" for paths in ids)
        raise UsageError(f"{word}: several experiments have a run of this id; give its folder:\n{listed}")
    if ids:
        return ids
    if known.get(word):
        return list(known[word].values())
    if Path(word).is_dir():
        return _in_folder(Path(word))
    raise UsageError(f"{word}: no run or experiment below {runs_root()} is called so; {_hint(word, known)}")


def _in_folder(folder: Path) -> list[RunPaths]:
    """Return the run that the folder is, or the runs that lie in it."""
    folder = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100  (".." goes, links stay as typed)
    if is_run(RunPaths(folder)):
        return [RunPaths(folder)]
    found = list(_runs_in(folder).values())
    if not found:
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise UsageError(f"{folder}: {what}; give a run id, a run's folder, or an experiment's name")
    return found


def _hint(word: str, known: _Runs) -> str:
    names = [*known, *(run_id for runs in known.values() for run_id in runs)]
    if close := nearest(word, names):
        return f"did you mean {close}?"
    return "`hpc-train status` lists them" if names else "there are no runs yet"
