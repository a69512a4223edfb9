"""The run id: a hash of the settings that determine the trained weights (a contract)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from hpc_train.experiment.config.keys import NOT_IDENTITY
from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.schema import Job

RUN_ID_LENGTH = 10
#: Part of the id, but not of the training result: a resume may change them and keeps the id.
CHANGEABLE = ("parallel",)


def content_hash(experiment: Job, scaled_by: Iterable[KeyPath] = ()) -> str:
    """Return the SHA-256 of the settings that matter, in hexadecimal.

    Defaults are omitted, so that writing one out, or a new key of a later version, changes nothing.
    ``scaled_by``: keys outside the id that a sweep varies, whose values are included in its runs' ids.
    """
    settings = _identity(experiment, exclude_defaults=True)
    if scaled := {dotted(path): _value(experiment, path) for path in scaled_by}:
        settings["scaled by"] = scaled
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def run_id(experiment: Job, scaled_by: Iterable[KeyPath] = ()) -> str:
    """Return the id of the run; equal experiments have equal ids. ``scaled_by``: see above."""
    return content_hash(experiment, scaled_by)[:RUN_ID_LENGTH]


def _value(experiment: Job, path: KeyPath) -> Any:
    value: Any = experiment.model_dump(mode="json")
    for segment in path:
        value = value[segment]
    return value


def changes_identity(old: Job, new: Job) -> list[str]:
    """Return the dotted keys that ``new`` may not change in a run of ``old``, in file order."""
    before, after = (_identity(experiment, exclude_defaults=False) for experiment in (old, new))
    for key in CHANGEABLE:
        before.pop(key, None)
        after.pop(key, None)
    return list(_differences(before, after))


def _identity(experiment: Job, *, exclude_defaults: bool) -> dict[str, Any]:
    settings = experiment.model_dump(mode="json", exclude_defaults=exclude_defaults)
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        section = settings
        for parent in parents:
            section = section.get(parent, {})
        section.pop(last, None)
    return settings


def _differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the keys in which two dumps differ; ``1`` and ``1.0`` do, as in the hash."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True):
        yield path
