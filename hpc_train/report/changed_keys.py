"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json
from hpc_train.run.run_facts import run_facts

#: Made once: ``json.dumps`` with options makes one per call.
_JSON = json.JSONEncoder(ensure_ascii=False)
#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
#: Values of one of these types that are equal are written alike.
_SCALARS = {str, int, float, bool, type(None)}
#: The value of a key that is not set.
_ABSENT = object()


def changed_keys(runs: Sequence[RunPaths]) -> dict[RunPaths, dict[str, Any]]:
    """Return for each run the dotted keys whose values differ among the runs, in schema order.

    Includes the changes of resumes. A run whose frozen experiment can't be read has no keys and is not
    compared; a key that one run lacks is None in it.
    """
    settings = _read(runs, _written)
    differing = _differing(settings.values())
    if any(key not in found for key in differing for found in settings.values()):
        # Written by different versions, or by 0.1: the defaults of the schema decide.
        settings = _read(runs, _settings)
        differing = _differing(settings.values())
    return {
        paths: {key: settings[paths].get(key) for key in differing} if paths in settings else {}
        for paths in runs
    }


def _read(
    runs: Sequence[RunPaths], settings_of: Callable[[RunPaths], dict[str, Any] | None]
) -> dict[RunPaths, dict[str, Any]]:
    """Return the values by dotted key, of the sections in which runs differ: of a sweep's most are alike."""
    sections: dict[RunPaths, dict[str, Any]] = {}
    #: Section's key → its text → its value, kept once for all runs.
    kept: dict[str, dict[str, Any]] = {}
    for paths in runs:
        texts = _texts(settings := settings_of(paths))
        if settings is not None and texts is not None:
            sections[paths] = {
                key: kept.setdefault(key, {}).setdefault(text, settings[key]) for key, text in texts.items()
            }
    alike = {
        key
        for key, texts in kept.items()
        if len(texts) == 1 and all(key in settings for settings in sections.values())
    }
    return {paths: flat for paths in sections if (flat := _flattened(sections[paths], alike)) is not None}


def _texts(sections: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the text of each section, other for ``1`` than for ``1.0``; None if nested too deeply."""
    try:
        return None if sections is None else {key: repr(section) for key, section in sections.items()}
    except RecursionError:
        return None


def _flattened(sections: Mapping[str, Any], left_out: Container[str]) -> dict[str, Any] | None:
    """Return the values of the sections by dotted key; None for a section nested too deeply."""
    flat: dict[str, Any] = {}
    try:
        _flatten({key: section for key, section in sections.items() if key not in left_out}, "", flat)
    except RecursionError:
        return None
    return flat


def _differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    every = list(settings)
    keys = dict.fromkeys(chain.from_iterable(every))
    return [key for key in keys if _differ([found.get(key, _ABSENT) for found in every])]


def _differ(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= _SCALARS:  # of thousands of runs most are
        return len(set(values)) > 1
    first = _comparable(values[0])
    return any(_comparable(value) != first for value in values)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest suffix of each dotted key that means only this key: no two have the same one."""
    return {key: next(end for end in _ends(key) if _means_only(key, end, keys)) for key in keys}


@lru_cache
def _short_names(keys: tuple[str, ...]) -> dict[str, str]:
    """Return ``short_names``: the runs of a sweep have the same keys."""
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
    """Return what ``resolved.json`` says, without the schema, which takes most of the time of many runs.

    Of a run that resumes have changed, or that can't be read so, what ``_settings`` returns.
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
    """Return what two values have in common only if they are written alike: ``1`` and ``1.0`` differ."""
    if value is _ABSENT or value is None or value == {}:
        return str, ""
    if isinstance(value, str | int | float):
        return type(value), value
    return list, json.dumps(value, sort_keys=True)


def _ends(key: str) -> Iterator[str]:
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[-count:])


def _means_only(key: str, end: str, keys: Sequence[str]) -> bool:
    """Tell whether ``end``, a suffix of ``key``, is no other key and no suffix of one; a whole key may be."""
    return end == key or (end not in keys and sum(each.endswith(f".{end}") for each in keys) == 1)
