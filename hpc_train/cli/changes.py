"""Changes between a run and its resume: of keys, of the experiment file since, and of versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.console import say
from hpc_train.errors import BadFileError, shortened
from hpc_train.experiment.config.keys import JOB, NOT_IDENTITY, BadKeyError, split_key
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.plan.sweep import CHANGEABLE, changes_identity
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.launchers.following import LOCAL
from hpc_train.paths import RunPaths, from_here
from hpc_train.run import find, frozen_experiment, run_status
from hpc_train.run.create import Origin, noted_versions, origin_of
from hpc_train.run.versions import Differences, differences, in_words, versions

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
#: Not relevant to an existing run.
_IGNORED = ("sweep",)
#: Excluded from the id, but part of the run's location.
_FIXED = ("name",)
#: Not part of the run's identity: its location and its sweep.
_OF_ANOTHER_RUN: dict[str, Callable[[Job], object]] = {
    "name": lambda experiment: experiment.name,
    "sweep.grid": lambda experiment: experiment.sweep.grid,
    "sweep.list": lambda experiment: experiment.sweep.list,
    "sweep.random": lambda experiment: experiment.sweep.random,
    "sweep.exclude": lambda experiment: experiment.sweep.exclude,
    "sweep.search": lambda experiment: experiment.sweep.search,
    # Unlike the rest of its section it changes the mathematics.
    "parallel.sync_batchnorm": lambda job: isinstance(job, Experiment) and job.parallel.sync_batchnorm,
}
#: Number of changes that are listed.
_NAMED = 10


def runs_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into runs and ``KEY=VALUE``."""
    overrides = [word for word in arguments if _OVERRIDE.fullmatch(word)]
    return [word for word in arguments if word not in overrides], overrides


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    path: KeyPath
    before: Any
    after: Any
    #: ``after`` as written in a file, without defaults.
    written: Any

    @property
    def key(self) -> str:
        """The path as messages show it, such as ``data.normalize.mean[0]``."""
        return dotted(self.path)

    @property
    def is_of_job(self) -> bool:
        """Whether it is a resource that a job requests, which does not matter on this machine."""
        return self.path[0] == JOB

    @property
    def can_be_taken(self) -> bool:
        """Return True if a resume may change it without changing the run's identity."""
        keys = [tuple(key.split(".")) for key in (*NOT_IDENTITY, *CHANGEABLE) if key not in _FIXED]
        return any(self.path[: len(key)] == key for key in keys)

    @property
    def words(self) -> str:
        """Return ``checkpoint.keep 3 → 5``."""
        return f"{self.key} {value_in_words(self.before)} → {value_in_words(self.written)}"

    @property
    def override(self) -> str:
        """Return ``KEY=VALUE`` for ``resume``."""
        return as_override(".".join(map(str, self.path)), self.written)


def key_of(override: str) -> str:
    """Return the key of ``KEY=VALUE``."""
    return override.partition("=")[0]


def as_override(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` as the command line parses it."""
    return f"{key}={_text(value)}"


def changes(before: Job, after: Job) -> list[Change]:
    """Return the keys that differ, in file order, except those of a sweep."""
    old, new = (experiment.model_dump(mode="json", exclude=set(_IGNORED)) for experiment in (before, after))
    short = after.model_dump(mode="json", exclude_defaults=True)
    return [
        Change(path, was, is_now, value_at(short, path, is_now))
        for path, was, is_now in _differences(old, new, ())
    ]


def changes_on_resume(frozen: Job, wanted: Job, *, is_queued: bool = False) -> list[Change]:
    """Return the keys that a resume may change and that differ; ``is_queued``: a job's resources, too."""
    allowed = [change for change in changes(frozen, wanted) if change.can_be_taken]
    return [change for change in allowed if is_queued or not change.is_of_job]


def other_run_keys(before: Job, after: Job) -> list[str]:
    """Return the dotted keys that differ and that a resume may not change."""
    others = [key for key, value in _OF_ANOTHER_RUN.items() if value(before) != value(after)]
    return [*changes_identity(before, after), *others]


def value_at(data: Any, path: KeyPath, default: Any = None) -> Any:
    """Return the value of a dumped experiment at ``path``."""
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def value_in_words(value: Any) -> str:
    """Return a value for a message, shortened."""
    return "absent" if value is None else shortened(_text(value))


def _differences(before: Any, after: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield paths and both values; a mapping whose keys differ is one value, since no key can be removed."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in after:
            yield from _differences(before[key], after[key], (*path, key))
    # 1 and 1.0 are different runs.
    elif json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True):
        yield path, before, after


def _text(value: Any) -> str:
    """Return the value as the command line parses it; text is unquoted if it is parsed as itself."""
    if isinstance(value, str) and read_value(value) == (value, []):
        return value
    return json.dumps(value, ensure_ascii=False)


def swept_values(paths: RunPaths, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in ``data`` of the keys that the run's sweep varied; these may be damaged."""
    values = {}
    for key in run_status.recorded_values(paths):
        with suppress(BadKeyError, KeyError, TypeError):
            values[key] = value_at(data, split_key(key))
    return values


def say_file_changes(runs: Sequence[tuple[RunPaths, Job]], *, is_queued: bool) -> None:
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
            runs_by_lines.setdefault(file.lines(paths, used, is_queued), []).append(find.run_name(paths))
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
    say(*(f"  {entry}" for entry in entries[:_NAMED]))
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

    def lines(self, paths: RunPaths, used: Job, is_queued: bool) -> tuple[str, ...]:
        """Return a heading and a line per change, or that they can't be determined; empty without changes."""
        try:
            if self._loaded is None:
                return (self._unreadable(),)
            frozen = frozen_experiment.read(paths)
            values = swept_values(paths, frozen.model_dump(mode="json"))
            wanted = self._loaded.variant(values) if values else self._loaded.experiment
            entries = list(_entries(frozen, wanted, used, is_queued))
        except BadFileError:
            return (self._unreadable(),)
        return (f"{self._name} has changed since:", *entries) if entries else ()

    def _unreadable(self) -> str:
        why = "has errors now" if self._is_there else "no longer exists"
        return f"{self._name} {why}, so its changes are unknown; the run continues with its own copy"


def _entries(frozen: Job, wanted: Job, used: Job, is_queued: bool) -> Iterator[str]:
    """Yield a line per key that differs between the file then and now, and between file and run."""
    uses = used.model_dump(mode="json")
    for change in changes(frozen, wanted):
        value = value_at(uses, change.path)
        if value != change.after and (is_queued or not change.is_of_job):
            continues = "without it" if value is None else f"with {value_in_words(value)}"
            remedy = f"; add {shlex.quote(change.override)} to take it over" if change.can_be_taken else ""
            yield f"{change.words} (the run continues {continues}{remedy})"


@dataclass(frozen=True)
class VersionChange:
    """The differences between the versions that ranks will use and their earlier ones."""

    #: None if the ranks use an interpreter that can't be queried here.
    now: dict[str, str] | None
    differences: Differences = field(default_factory=dict)
    #: The interpreter whose versions are unknown.
    not_compared: str | None = None

    @property
    def words(self) -> str | None:
        """Return the message, None if nothing has changed."""
        if self.not_compared:
            return f"versions: not compared, because of {self.not_compared}"
        if self.differences:
            return f"versions: {in_words(self.differences)}; the weights may differ in the last bit"
        return None


def other_python(launcher: str, experiment: Job) -> str | None:
    """Return the key that makes ranks use another interpreter than this one, with its value."""
    environment = experiment.environment
    if launcher == LOCAL:
        return None
    if environment.container is not None:
        return f"environment.container {environment.container.image}"
    if environment.python is not None and not _is_this(environment.python):
        return f"environment.python {environment.python}"
    return None


def version_change(
    paths: RunPaths, before: str | None, after: str | None, *, new_code: bool
) -> VersionChange:
    """Compare versions. ``before``, ``after``: the other interpreter that the run used, and will use."""
    if after:
        return VersionChange(None, not_compared=after)
    then, now = noted_versions(paths), versions()
    if not new_code and os.path.lexists(paths.code) and "hpc-train" in then:
        now["hpc-train"] = then["hpc-train"]  # ranks import the hpc_train of the run's snapshot
    if before:
        return VersionChange(now, not_compared=f"{before}, which the run had")
    return VersionChange(now, differences(then, now))


def _is_this(python: str) -> bool:
    """Return True if ``python`` is this interpreter, by any name in the same folder."""
    # Links are not resolved: a virtual environment's link leads to another Python's folder.
    path, this = Path(python).expanduser(), Path(sys.executable)
    return path.parent == this.parent and path.resolve() == this.resolve()
