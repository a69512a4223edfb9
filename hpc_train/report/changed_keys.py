"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, cast

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json
from hpc_train.run.run_facts import run_facts

#: Made once: ``json.dumps`` with options makes one per call.
_JSON = json.JSONEncoder(ensure_ascii=False)
#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
#: Types whose equal values are written identically.
_SCALARS = {str, int, float, bool, type(None)}
#: The value of a key that is not set.
_ABSENT = object()
#: Values by dotted key, and those of a run without the section.
_Section = dict[str, Any]
_EMPTY: _Section = {}
#: A run's sections by name.
_Settings = dict[str, _Section]


def changed_keys(runs: Sequence[RunPaths]) -> dict[RunPaths, dict[str, Any]]:
    """Return for each run the dotted keys whose values differ among the runs, in schema order.

    Includes the changes of resumes. A run whose frozen experiment can't be read has no keys and is not
    compared; a key that a run lacks is None for it.
    """
    settings = _read(runs, _written)
    differing = _differing(settings)
    if any(key not in flat for section, key in differing for flat in _variants(settings, section)):
        # Written by different versions: the defaults of the schema decide.
        settings = _read(runs, _settings)
        differing = _differing(settings)
    return {
        paths: {key: settings[paths].get(section, _EMPTY).get(key) for section, key in differing}
        if paths in settings
        else {}
        for paths in runs
    }


def _read(
    runs: Sequence[RunPaths], settings_of: Callable[[RunPaths], dict[str, Any] | None]
) -> dict[RunPaths, _Settings]:
    """Return the settings of the runs that can be read. Equal sections of several runs are one object."""
    settings: dict[RunPaths, _Settings] = {}
    #: Section's name → its text → its values, None if they are nested too deeply.
    variants: dict[str, dict[bytes, _Section | None]] = {}
    for paths in runs:
        sections = settings_of(paths)
        texts = _texts(sections)
        if sections is None or texts is None:
            continue
        by_name: dict[str, _Section | None] = {}
        for name, text in texts.items():
            by_text = variants.setdefault(name, {})
            if text not in by_text:
                by_text[text] = _flattened(name, sections[name])
            by_name[name] = by_text[text]
        if None not in by_name.values():
            settings[paths] = cast(_Settings, by_name)
    return settings


def _texts(sections: Mapping[str, Any] | None) -> dict[str, bytes] | None:
    """Return each section in binary form, which differs between ``1`` and ``1.0``; None if nested too deeply.

    Twice as fast as ``repr``. Uses the old version of the format, without references to earlier objects.
    """
    try:
        return (
            None
            if sections is None
            else {key: marshal.dumps(section, 2) for key, section in sections.items()}
        )
    except ValueError:
        return None


def _flattened(name: str, value: Any) -> _Section | None:
    """Return the values of a section by dotted key; None if it is nested too deeply."""
    flat: _Section = {}
    try:
        _flatten({name: value}, "", flat)
    except RecursionError:
        return None
    return flat


def _differing(settings: Mapping[RunPaths, _Settings]) -> list[tuple[str, str]]:
    """Return the section and the dotted key of each value that differs among the runs."""
    names = dict.fromkeys(chain.from_iterable(settings.values()))
    variants = {name: _variants(settings, name) for name in names}
    return [
        (name, key)
        for name, flats in variants.items()
        if len(flats) > 1  # most sections of a sweep are equal in all runs
        for key in dict.fromkeys(chain.from_iterable(flats))
        if _differ([flat.get(key, _ABSENT) for flat in flats])
    ]


def _variants(settings: Mapping[RunPaths, _Settings], section: str) -> list[_Section]:
    """Return the different contents that a section has in the runs; a run without it has an empty one."""
    return list(
        {
            id(flat): flat for sections in settings.values() for flat in (sections.get(section, _EMPTY),)
        }.values()
    )


def _differ(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= _SCALARS:  # most of thousands of runs are
        return len(set(values)) > 1
    first = _comparable(values[0])
    return any(_comparable(value) != first for value in values)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest suffix of each dotted key that identifies it uniquely."""
    return {key: next(end for end in _suffixes(key) if _identifies(end, key, keys)) for key in keys}


def _suffixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[place:]) for place in reversed(range(len(parts)))]


def _identifies(suffix: str, key: str, keys: Sequence[str]) -> bool:
    """Return True if ``suffix`` belongs to no other of the keys; a whole key always identifies itself."""
    if suffix == key:
        return True
    return suffix not in keys and sum(other.endswith(f".{suffix}") for other in keys) == 1


@lru_cache
def _short_names(keys: tuple[str, ...]) -> dict[str, str]:
    """Return ``short_names``, cached: the runs of a sweep have the same keys."""
    return short_names(keys)


def in_words(values: Mapping[str, Any]) -> str:
    """Return ``lr=0.1 seed=2``."""
    names = _short_names(tuple(values))
    return " ".join(f"{names[key]}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value as written in an experiment file, None as ``-``."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else _JSON.encode(value)


def _written(paths: RunPaths) -> dict[str, Any] | None:
    """Return the content of ``resolved.json``, without the schema, which is slow for many runs.

    For a run that resumes have changed, or that can't be read this way, return the result of ``_settings``.
    """
    resolved = None if run_facts(paths).get("changes") else read_json(paths.resolved)
    if resolved is None:
        return _settings(paths)
    return {key: section for key, section in resolved.items() if key not in _LEFT_OUT}


def _settings(paths: RunPaths) -> dict[str, Any] | None:
    from hpc_train.run.create import effective_experiment

    try:
        experiment = effective_experiment(paths, newest_number(paths) + 1)
    except (HpcTrainError, OSError):
        return None
    return experiment.model_dump(mode="json", exclude=set(_LEFT_OUT))


def _flatten(section: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    """Put the values of a section into ``flat``, by dotted key."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            _flatten(value, f"{prefix}{key}.", flat)
        else:
            flat[f"{prefix}{key}"] = value


def _comparable(value: Any) -> tuple[type, Any]:
    """Return a key that is equal only for values that are written identically: ``1`` and ``1.0`` differ."""
    if value is _ABSENT or value is None or value == {}:
        return str, ""
    if isinstance(value, str | int | float):
        return type(value), value
    return list, json.dumps(value, sort_keys=True)
