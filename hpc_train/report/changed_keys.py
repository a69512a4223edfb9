"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import is_, ne
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_text
from hpc_train.run.run_status import run_facts

#: Made once: ``json.dumps`` with options makes one per call.
_JSON = json.JSONEncoder(ensure_ascii=False)
#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
#: Types whose equal values are written identically.
_SCALARS = {str, int, float, bool, type(None)}
#: The value of a key that is not set.
_ABSENT = object()
#: A template takes as long as reading 20 files.
_MAX_TEMPLATES = 50
#: A line of ``resolved.json`` with a key and its whole value: a text, a number or a word.
_LINE = re.compile(r'( *"(?:[^"\\]|\\.)*": )("(?:[^"\\]|\\.)*"|[^][{}",\s]+)(,?)')


def changed_keys(runs: Sequence[RunPaths]) -> dict[RunPaths, dict[str, Any]]:
    """Return for each run the dotted keys whose values differ among the runs, in schema order.

    Includes the changes of resumes. A run whose frozen experiment can't be read has no keys and is not
    compared; a key that a run lacks is None for it.
    """
    settings = _read(runs, _Written({}).settings)
    differing = _differing(settings)
    if any(key not in flat for flat in settings.values() for key in differing):
        # Written by different versions: the defaults of the schema decide.
        settings = _read(runs, _settings)
        differing = _differing(settings)
    return {
        paths: {key: settings[paths].get(key) for key in differing} if paths in settings else {}
        for paths in runs
    }


def _read(
    runs: Sequence[RunPaths], settings_of: Callable[[RunPaths], dict[str, Any] | None]
) -> dict[RunPaths, dict[str, Any]]:
    flats: dict[RunPaths, dict[str, Any]] = {}
    for paths in runs:
        with suppress(RecursionError):  # nested too deeply
            if (flat := settings_of(paths)) is not None:
                flats[paths] = flat
    return flats


def _differing(settings: Mapping[RunPaths, dict[str, Any]]) -> list[str]:
    flats = settings.values()
    keys = dict.fromkeys(chain.from_iterable(flats))
    return [key for key in keys if _differ([flat.get(key, _ABSENT) for flat in flats])]


def _differ(values: Sequence[Any]) -> bool:
    if all(map(is_, values, repeat(values[0]))):  # of files of equal layout, most are the same object
        return False
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= _SCALARS:  # most of thousands of runs are
        return len(set(values)) > 1
    first = _comparable(values[0])
    return any(_comparable(value) != first for value in values)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest suffix of each dotted key that identifies it uniquely; never ``name`` alone."""
    return _short_names(tuple(keys))


@lru_cache  # the runs of a sweep have the same keys
def _short_names(keys: tuple[str, ...]) -> dict[str, str]:
    return {key: _short_name(key, keys) for key in keys}


def _short_name(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for place in range(len(parts) - 1, 0, -1):
        suffix = ".".join(parts[place:])
        if suffix not in {"name", *keys} and sum(other.endswith(f".{suffix}") for other in keys) == 1:
            return suffix
    return key


def in_words(values: Mapping[str, Any]) -> str:
    """Return ``lr=0.1 seed=2``."""
    names = short_names(list(values))
    return " ".join(f"{names[key]}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value as written in an experiment file, None as ``-``."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else _JSON.encode(value)


@dataclass(frozen=True)
class _Template:
    """A file that was parsed: another one is only parsed in the lines in which it differs."""

    lines: list[str]
    #: Of each line; None for a line without a whole value.
    keys: list[str | None]
    flat: dict[str, Any]

    @classmethod
    def of(cls, text: str, data: Mapping[str, Any], flat: dict[str, Any]) -> _Template | None:
        """Return the template of a file with this content; None if it is not written as we write it."""
        names = [key for key, _ in _flattened(data)]
        is_ours = text.rstrip() == json.dumps(data, indent=1, ensure_ascii=False)
        if not is_ours or len(set(names)) < len(names):
            return None
        return cls(text.split("\n"), [None, *_keys_of_lines(data), None], flat)

    def settings(self, lines: Sequence[str]) -> dict[str, Any] | None:
        """Return the flattened settings of a file with as many lines; None if it has to be parsed.

        Each line ends between two tokens of JSON, so if the lines differ in single values only, so do the
        files.
        """
        changed = {}
        for place in compress(range(len(lines)), map(ne, lines, self.lines)):
            old, new = _LINE.fullmatch(self.lines[place]), _LINE.fullmatch(lines[place])
            key = self.keys[place] if place < len(self.keys) else None
            if key is None or old is None or new is None or old.group(1, 3) != new.group(1, 3):
                return None
            try:
                changed[key] = json.loads(new[2])
            except ValueError:
                return None
        return self.flat | {key: value for key, value in changed.items() if key in self.flat}


@dataclass(frozen=True)
class _Written:
    """Reads ``resolved.json`` of many runs without the schema, which is slow."""

    #: By number of lines; None: files of that length are not written as we write them.
    templates: dict[int, _Template | None]

    def settings(self, paths: RunPaths) -> dict[str, Any] | None:
        """Return the flattened content of the run's file.

        For a run that resumes have changed, or a file that can't be read this way, ``_settings``.
        """
        try:
            text = "" if run_facts(paths).get("changes") else read_text(paths.resolved)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return _settings(paths)
        lines = text.split("\n")
        template = self.templates.get(len(lines))
        if template is not None and (flat := template.settings(lines)) is not None:
            return flat
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return _settings(paths)
        if not isinstance(data, dict):
            return _settings(paths)
        flat = _flat(data)
        if len(lines) not in self.templates and len(self.templates) < _MAX_TEMPLATES:
            self.templates[len(lines)] = None
            with suppress(RecursionError):
                self.templates[len(lines)] = _Template.of(text, data, flat)
        return flat


def _keys_of_lines(section: Mapping[str, Any], prefix: str = "") -> Iterator[str | None]:
    """Yield the key of each line between the braces of a section in JSON, None without a whole value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield None
            yield from _keys_of_lines(value, f"{prefix}{key}.")
            yield None
        else:
            num_lines = json.dumps(value, indent=1).count("\n") + 1
            yield from [f"{prefix}{key}"] if num_lines == 1 else [None] * num_lines


def _settings(paths: RunPaths) -> dict[str, Any] | None:
    from hpc_train.run.create import effective_experiment

    try:
        experiment = effective_experiment(paths, newest_number(paths) + 1)
    except (HpcTrainError, OSError):
        return None
    return _flat(experiment.model_dump(mode="json"))


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_flattened({key: section for key, section in sections.items() if key not in _LEFT_OUT}))


def _flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _comparable(value: Any) -> tuple[type, Any]:
    """Return a key that is equal only for values that are written identically: ``1`` and ``1.0`` differ."""
    if value is _ABSENT or value is None or value == {}:
        return str, ""
    if isinstance(value, str | int | float):
        return type(value), value
    return list, json.dumps(value, sort_keys=True)
