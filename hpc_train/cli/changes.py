"""The differences between two experiments, key by key, and as KEY=VALUE for ``resume``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_train.config.keys import JOB, NOT_IDENTITY, BadKeyError, split_key
from hpc_train.config.marked_yaml import read_value
from hpc_train.config.problems import KeyPath, dotted
from hpc_train.config.schema import Experiment
from hpc_train.errors import shortened
from hpc_train.paths import RunPaths
from hpc_train.plan.identity import CHANGEABLE
from hpc_train.run.run_facts import recorded_values

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
#: Not relevant to an existing run.
_IGNORED = ("sweep",)
#: Excluded from the id, but part of the run's location.
_FIXED = ("name",)


def runs_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into runs and ``KEY=VALUE``."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    return [word for word in words if word not in overrides], overrides


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
    def override(self) -> str:
        """Return ``KEY=VALUE`` for ``resume``."""
        return as_override(".".join(map(str, self.path)), self.written)


def as_override(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` as the command line parses it."""
    return f"{key}={_text(value)}"


def changes(before: Experiment, after: Experiment) -> list[Change]:
    """Return the keys that differ, in file order, except those of a sweep."""
    old, new = (experiment.model_dump(mode="json", exclude=set(_IGNORED)) for experiment in (before, after))
    short = after.model_dump(mode="json", exclude_defaults=True)
    return [
        Change(path, was, is_now, value_at(short, path, is_now))
        for path, was, is_now in _differences(old, new, ())
    ]


def changes_on_resume(frozen: Experiment, wanted: Experiment, *, is_queued: bool = False) -> list[str]:
    """Return ``KEY=VALUE`` for each key that a resume may change and that differs in ``wanted``.

    ``is_queued``: including the resources that a job requests, which don't matter on this machine.
    """
    found = [change for change in changes(frozen, wanted) if change.can_be_taken]
    return [change.override for change in found if is_queued or not change.is_of_job]


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
    found = {}
    for key in recorded_values(paths):
        with suppress(BadKeyError, KeyError, TypeError):
            found[key] = value_at(data, split_key(key))
    return found
