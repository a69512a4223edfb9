"""What the file says otherwise than the run that was made of it, as KEY=VALUE for ``resume``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hpc_train.config.keys import NOT_IDENTITY
from hpc_train.config.marked_yaml import read_value
from hpc_train.config.schema import Experiment

#: Means nothing to a run that is there already.
_IGNORED = {"name", "sweep"}


def changes_on_resume(frozen: Experiment, wanted: Experiment, *, with_slurm: bool = False) -> list[str]:
    """Return ``KEY=VALUE`` of each key outside the identity that ``wanted`` says otherwise.

    ``with_slurm``: also of what is asked of Slurm, which means nothing on this machine.
    """
    before, after = (experiment.model_dump(mode="json") for experiment in (frozen, wanted))
    short = wanted.model_dump(mode="json", exclude_defaults=True)
    found: list[str] = []
    for key in NOT_IDENTITY:
        if key not in _IGNORED and (with_slurm or key != "slurm"):
            path = tuple(key.split("."))
            pairs = _differences(_at(before, path), _at(after, path), path)
            found += [f"{'.'.join(each)}={_text(_at(short, each, value))}" for each, value in pairs]
    return found


def _differences(before: Any, after: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths and new values; a mapping whose keys differ is one value, for no key can be taken out."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in after:
            yield from _differences(before[key], after[key], (*path, key))
    elif before != after:
        yield path, after


def _at(data: Any, path: tuple[str, ...], default: Any = None) -> Any:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def _text(value: Any) -> str:
    """Return the value as the command line reads it; text stands bare where it is read as itself."""
    if isinstance(value, str) and read_value(value) == (value, []):
        return value
    return json.dumps(value, ensure_ascii=False)
