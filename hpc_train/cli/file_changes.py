"""Changes of the file since a run was created from it, which ``resume`` reports but does not apply."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_train.cli.changes import Change, changes, swept_values, value_at, value_in_words
from hpc_train.config.schema import Experiment
from hpc_train.console import say
from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths, from_here
from hpc_train.run import frozen_experiment
from hpc_train.run.create import Origin, origin_of
from hpc_train.run.find import run_name
from hpc_train.validate.loading import Loaded, load

#: Number of changes that are listed.
_NAMED = 10


def say_file_changes(runs: Sequence[tuple[RunPaths, Experiment]], *, is_queued: bool) -> None:
    """Report the changes in the files of runs, each given with the experiment that it will use.

    ``is_queued``: including the resources that a job requests. Runs with the same changes are reported
    together.
    """
    files: dict[str, _File] = {}
    runs_by_lines: dict[tuple[str, ...], list[str]] = {}
    for paths, used in runs:
        origin = origin_of(paths)
        if origin is not None:
            file = files.setdefault(repr(origin), _File(origin))
            runs_by_lines.setdefault(file.lines(paths, used, is_queued), []).append(run_name(paths))
    for lines, ids in runs_by_lines.items():
        _say_lines(either(ids), lines)


def either(ids: Sequence[str]) -> str:
    """Return the run's id if there is one run, else the number of runs."""
    return ids[0] if len(ids) == 1 else f"{len(ids)} runs"


def _say_lines(who: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    head, *entries = lines
    if len(entries) <= 1:
        say(f"{who}: {' '.join(lines)}")
        return
    say(f"{who}: {head}")
    for entry in entries[:_NAMED]:
        say(f"  {entry}")
    if len(entries) > _NAMED:
        say(f"  and {len(entries) - _NAMED} more")


class _File:
    """A file from which runs were created, read once for all of them."""

    def __init__(self, origin: Origin) -> None:
        file = Path(origin.file)
        self._name = from_here(file)
        self._is_there = file.exists()
        self._loaded: Loaded | None = None
        try:
            self._loaded = load(file, origin.overrides, check_names=False)
        except BadFileError:
            return

    def lines(self, paths: RunPaths, used: Experiment, is_queued: bool) -> tuple[str, ...]:
        """Return a heading and a line per change, or that they can't be determined; empty without changes."""
        try:
            if self._loaded is None:
                return (self._unreadable(),)
            frozen = frozen_experiment.read(paths)
            entries = list(_entries(frozen, _as_run(self._loaded, paths, frozen), used, is_queued))
        except BadFileError:
            return (self._unreadable(),)
        return (f"{self._name} has changed since:", *entries) if entries else ()

    def _unreadable(self) -> str:
        why = "has errors now" if self._is_there else "no longer exists"
        return f"{self._name} {why}, so its changes are unknown; the run continues with its own copy"


def _as_run(loaded: Loaded, paths: RunPaths, frozen: Experiment) -> Experiment:
    """Return the file's experiment for a run with the swept values of ``frozen``."""
    data = frozen.model_dump(mode="json")
    values = swept_values(paths, data)
    return loaded.variant(values) if values else loaded.experiment


def _entries(frozen: Experiment, wanted: Experiment, used: Experiment, is_queued: bool) -> Iterator[str]:
    """Yield a line per key that differs between the file then and now, and between file and run."""
    uses = used.model_dump(mode="json")
    for change in changes(frozen, wanted):
        value = value_at(uses, change.path)
        if value != change.after and (is_queued or not change.is_of_job):
            yield _entry(change, value)


def _entry(change: Change, used: object) -> str:
    goes_on = "without it" if used is None else f"with {value_in_words(used)}"
    remedy = f"; add {shlex.quote(change.override)} to take it over" if change.can_be_taken else ""
    before, after = value_in_words(change.before), value_in_words(change.written)
    return f"{change.key} {before} → {after} (the run continues {goes_on}{remedy})"
