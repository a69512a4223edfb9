"""The expected content of a run folder's small JSON files, by file name.

The files may be damaged, or written by someone else. ``files.read_json`` checks a file once, on reading, and
treats one that does not fit as unreadable, so that its readers can rely on the types. Keys may be missing;
unlisted keys (of a later version) are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
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
    "wandb_id": str,
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
    "cause": str | None,
    "events": dict[str, str],
    "save_s": float | None,
    "checkpoint_stall_s": float | None,
    "bad_nodes": dict[str, str],
    "saved_step": int | None,
}
_EVENTS = {
    "events": dict[str, str],
    "save_s": float | None,
    "signal": str | None,
    "checkpoint_stall_s": float | None,
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
}


def fits(data: Mapping[str, Any], name: str) -> bool:
    """Tell whether ``data`` is valid content of the file of that name."""
    shape = SHAPES.get(name, {})
    code = data.get("code") if name == "run.json" else None
    is_sound = all(is_a(data[key], kind) for key, kind in shape.items() if key in data)
    return is_sound and all(is_a(value, _CODE[key]) for key, value in (code or {}).items() if key in _CODE)


def is_a(value: object, kind: Any) -> bool:
    """Tell whether a value from JSON is of ``kind``: a type, a union, ``list[…]`` or ``dict[…, …]``."""
    if kind is Any:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(is_a(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return isinstance(value, list) and all(is_a(each, item) for each in value)
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return isinstance(value, dict) and all(is_a(k, key) and is_a(v, item) for k, v in value.items())
    return _is_plain(value, kind)


def _is_plain(value: object, kind: Any) -> bool:
    if kind is NoneType:
        return value is None
    if kind is Number:
        return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19
    if kind is Time:
        return isinstance(value, str) and _is_time(value)
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or is_a(value, int)
    if kind is int:
        return type(value) is int and -_MAX_INT < value < _MAX_INT
    return type(value) is kind


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
