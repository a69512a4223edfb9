"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json
from hpc_train.run.run_status import run_facts

#: Made once: ``json.dumps`` with options makes one per call.
_JSON = json.JSONEncoder(ensure_ascii=False)
#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
#: Types whose equal values are written identically.
_SCALARS = {str, int, float, bool, type(None)}
#: The value of a key that is not set.
_ABSENT = object()


def changed_keys(runs: Sequence[RunPaths]) -> dict[RunPaths, dict[str, Any]]:
    """Return for each run the dotted keys whose values differ among the runs, in schema order.

    Includes the changes of resumes. A run whose frozen experiment can't be read has no keys and is not
    compared; a key that a run lacks is None for it.
    """
    settings = _read(runs, _written)
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
        if (sections := settings_of(paths)) is not None:
            with suppress(RecursionError):  # nested too deeply
                flats[paths] = dict(_flattened(sections))
    return flats


def _differing(settings: Mapping[RunPaths, dict[str, Any]]) -> list[str]:
    flats = settings.values()
    keys = dict.fromkeys(chain.from_iterable(flats))
    return [key for key in keys if _differ([flat.get(key, _ABSENT) for flat in flats])]


def _differ(values: Sequence[Any]) -> bool:
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
