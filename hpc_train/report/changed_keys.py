"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json
from hpc_train.run.run_facts import run_facts

#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
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
    return {paths: found for paths in runs if (found := settings_of(paths)) is not None}


def _differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    every = list(settings)
    keys = dict.fromkeys(key for found in every for key in found)
    return [key for key in keys if _differs(key, every)]


def _differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    first = _comparable(settings[0].get(key, _ABSENT))
    return any(_comparable(found.get(key, _ABSENT)) != first for found in settings)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest suffix of each dotted key that is unique among the keys."""
    return {key: next(end for end in _ends(key) if _is_unique(end, keys)) for key in keys}


def in_words(values: Mapping[str, Any]) -> str:
    """Return ``lr=0.1 seed=2``."""
    names = short_names(list(values))
    return " ".join(f"{names[key]}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value as written in an experiment file, None as ``-``."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _written(paths: RunPaths) -> dict[str, Any] | None:
    """Return what ``resolved.json`` says, without the schema, which takes most of the time of many runs.

    Of a run that resumes have changed, or that can't be read so, what ``_settings`` returns.
    """
    resolved = None if run_facts(paths).get("changes") else read_json(paths.resolved)
    if resolved is None:
        return _settings(paths)
    flat: dict[str, Any] = {}
    try:
        _flatten({key: value for key, value in resolved.items() if key not in _LEFT_OUT}, "", flat)
    except RecursionError:
        return None
    return flat


def _settings(paths: RunPaths) -> dict[str, Any] | None:
    from hpc_train.run.create import effective_experiment

    try:
        experiment = effective_experiment(paths, newest_number(paths) + 1)
    except (HpcTrainError, OSError):
        return None
    flat: dict[str, Any] = {}
    _flatten(experiment.model_dump(mode="json", exclude=set(_LEFT_OUT)), "", flat)
    return flat


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


def _is_unique(end: str, keys: Sequence[str]) -> bool:
    return end in keys or sum(key == end or key.endswith(f".{end}") for key in keys) == 1
