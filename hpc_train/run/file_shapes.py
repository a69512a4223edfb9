"""The expected content of a run folder's small JSON files, by file name.

The files may be damaged, or written by someone else. ``files.read_json`` checks a file once, on reading, and
treats one that does not fit as unreadable, so that its readers can rely on the types. Keys may be missing;
unlisted keys (of a later version) are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin

#: A decimal number as a key of a JSON object.
Number = NewType("Number", str)
#: ISO 8601.
Time = NewType("Time", str)

#: More than any step, size or process id; arithmetic on larger numbers overflows a float.
_MAX_INT = 2**63
_CODE = {
    "commit": str | None,
    "dirty": bool | None,
    "snapshot": str,
    "folder": str,
    "earlier": list[dict[str, Any]],
}
_RUN = {
    "id": str,
    "name": str,
    "content_hash": str,
    "created": str,
    "creator": dict[str, Any] | None,
    "source": dict[str, str | list[str] | None] | None,
    "versions": dict[str, str] | None,
    "versions_by_attempt": dict[Number, dict[str, str]] | None,
    "code": dict[str, Any] | None,
    "launcher": str | None,
    "slurm_job_ids": list[str] | None,
    "slurm_clusters": list[str | None] | None,
    "wandb_id": str,
    "inputs": dict[str, dict[str, str]] | None,
    "changes": dict[Number, list[str]] | None,
}
_ATTEMPT = {
    "attempt": int,
    "start": Time,
    "checkpoints": list[str],
    "launcher_process": dict[str, Any] | None,
    "launcher": str | None,
    "hosts": list[str],
    "ranks": int | None,
    "devices": int | None,
    "rank_processes": list[dict[str, Any]],
    "end": Time | None,
    "exit_codes": list[int] | None,
    "reason": str | None,
    "slurm_job": str | None,
    "restart": int | None,
    "cluster": str | None,
    "time_limit_s": float | None,
    "requested_limit_s": float | None,
    "lead_s": float | None,
    "cause": str | None,
    "events": dict[str, str],
    "save_s": float | None,
    "checkpoint_stall_s": float | None,
    "first_step": dict[str, float],
    "bad_nodes": dict[str, str],
    "saved_step": int | None,
}
_EVENTS = {
    "events": dict[str, str],
    "save_s": float | None,
    "signal": str | None,
    "checkpoint_stall_s": float | None,
    "first_step": dict[str, float],
}
_SUBMISSION = {
    "token": str,
    "created": str,
    "creator": dict[str, Any] | None,
    "runs": list[str],
    "max_parallel": int | None,
    "stays_held": bool,
    "state": str,
    "job_id": str | None,
    "batch": dict[str, Any] | None,
    "cluster": str | None,
}
_SNAPSHOT = {
    "content": str,
    "cwd": str,
    "search_path": list[str],
    "files": dict[str, str],
    "links": dict[str, str],
    "left_out": dict[str, str],
}
#: File name → key → type.
SHAPES: dict[str, Mapping[str, Any]] = {
    "run.json": _RUN,
    "attempt.json": _ATTEMPT,
    "events.json": _EVENTS,
    "submission.json": _SUBMISSION,
    "snapshot.json": _SNAPSHOT,
    "sync.json": {"targets": dict[str, dict[str, Any]]},
}


#: Types without subtypes in JSON.
_EXACT = {str, bool, NoneType}
#: Returns True if a value is of some kind.
_Check = Callable[[object], bool]


def fits(data: Mapping[str, Any], name: str) -> bool:
    """Return True if ``data`` is valid content of the file of that name."""
    code = data.get("code") if name == "run.json" else None
    return _fits(data, _checks(name)) and (not code or _fits(code, _checks("code")))


def _fits(data: object, checks: Mapping[str, _Check]) -> bool:
    if not isinstance(data, dict):
        return False
    for key, check in checks.items():  # noqa: SIM110  (of each file of thousands of runs)
        if key in data and not check(data[key]):
            return False
    return True


@cache
def _checks(name: str) -> dict[str, _Check]:
    shape = _CODE if name == "code" else SHAPES.get(name, {})
    return {key: _check_of(kind) for key, kind in shape.items()}


def is_a(value: object, kind: Any) -> bool:
    """Return True if a value from JSON is of ``kind``: a type, a union, ``list[…]`` or ``dict[…, …]``."""
    return _check_of(kind)(value)


@cache
def _check_of(kind: Any) -> _Check:
    """Return the check of a kind. Made once: ``status`` reads the files of thousands of runs."""
    if get_origin(kind) in (Union, UnionType):
        return _check_of_union(get_args(kind))
    if get_origin(kind) is list:
        (is_item,) = map(_check_of, get_args(kind))
        return lambda value: isinstance(value, list) and (not value or all(map(is_item, value)))
    if get_origin(kind) is dict:
        return _check_of_dict(*get_args(kind))
    plain: dict[Any, _Check] = {
        Any: lambda value: True,
        NoneType: lambda value: value is None,
        Number: _is_number,
        Time: _is_time,
        float: _is_float,
        int: _is_int,
    }
    return plain.get(kind) or (lambda value: type(value) is kind)


def _check_of_union(members: tuple[Any, ...]) -> _Check:
    if _EXACT.issuperset(members):
        return lambda value: type(value) in members
    first, *others = (_check_of(member) for member in members if member is not NoneType)
    if not others:
        return lambda value: value is None or first(value)
    may_be_none = NoneType in members
    return lambda value: (
        (may_be_none and value is None) or first(value) or any(is_other(value) for is_other in others)
    )


def _check_of_dict(key: Any, item: Any) -> _Check:
    is_key, is_item = _check_of(key), _check_of(item)
    if key is str and item is Any:  # JSON has no other keys
        return lambda value: isinstance(value, dict)
    return lambda value: (
        isinstance(value, dict)
        and (not value or (all(map(is_key, value)) and all(map(is_item, value.values()))))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19


def _is_float(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or _is_int(value)


def _is_int(value: object) -> bool:
    return type(value) is int and -_MAX_INT < value < _MAX_INT


def _is_time(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True
