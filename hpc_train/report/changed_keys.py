"""The keys in which runs differ: the values that distinguish the runs of a sweep, or two experiments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number

#: Shown elsewhere, or equal in the runs that they describe.
_LEFT_OUT = ("name", "sweep")
#: The value of a key that is not set.
_ABSENT = object()


def changed_keys(runs: Sequence[RunPaths]) -> dict[RunPaths, dict[str, Any]]:
    """Return for each run the dotted keys whose values differ among the runs, in schema order.

    Includes the changes of resumes. A run whose frozen experiment can't be read has no keys and is not
    compared; a key that one run lacks is None in it.
    """
    settings = {paths: found for paths in runs if (found := _settings(paths)) is not None}
    keys = dict.fromkeys(key for found in settings.values() for key in found)
    differing = [key for key in keys if len({_comparable(found, key) for found in settings.values()}) > 1]
    return {
        paths: {key: settings[paths].get(key) for key in differing} if paths in settings else {}
        for paths in runs
    }


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


def _settings(paths: RunPaths) -> dict[str, Any] | None:
    from hpc_train.run.create import effective_experiment

    try:
        experiment = effective_experiment(paths, newest_number(paths) + 1)
    except (HpcTrainError, OSError):
        return None
    return dict(_flat(experiment.model_dump(mode="json", exclude=set(_LEFT_OUT)), ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _flat(below, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _comparable(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key, _ABSENT)
    return "" if value is _ABSENT or value is None or value == {} else json.dumps(value, sort_keys=True)


def _ends(key: str) -> Iterator[str]:
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[-count:])


def _is_unique(end: str, keys: Sequence[str]) -> bool:
    return end in keys or sum(key == end or key.endswith(f".{end}") for key in keys) == 1
