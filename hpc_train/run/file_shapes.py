"""The content of a run folder's small JSON files: its check and its decoding.

The files may be damaged, or written by someone else. ``files.read_json`` checks a file of ``SHAPES`` once, on
reading, and treats one that does not fit as unreadable, so that its readers can rely on the types.
``decoded`` makes a dataclass from JSON by its annotations. Keys may be missing; unknown keys (of a later
version) are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
#: Returns True if a value is of some kind.
_Check = Callable[[object], bool]
#: More than any step, size or process id; arithmetic on larger numbers overflows a float.
_MAX_INT = 2**63
#: Types without subtypes in JSON.
_EXACT = {str, bool, NoneType}
#: The key in a field's metadata of its key in JSON, if that is not its name.
JSON_KEY = "json key"
_WRONG = object()


def _is_time(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


#: A decimal number as a key of a JSON object.
Number = Annotated[str, lambda text: text.isascii() and text.isdecimal() and len(text) < 19]
#: ISO 8601.
Time = Annotated[str, _is_time]
#: A number from 0 on.
Count = Annotated[int, lambda number: number >= 0]

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
    "extends": dict[str, str | int] | None,
    "extended_by": list[str] | None,
    "stage": dict[str, str | int | None] | None,
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
    "submission.json": _SUBMISSION,
    "snapshot.json": _SNAPSHOT,
    "sync.json": {"targets": dict[str, dict[str, Any]]},
}


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
    """Return True if a value from JSON is of ``kind``, a type or one of typing's, also with a check."""
    return _check_of(kind)(value)


def decoded(kind: type[T], data: object) -> T | None:
    """Return the dataclass of this kind that ``encoded`` wrote; None if ``data`` is not one.

    A missing key has the field's default, or None if the field allows it. A nested dataclass that is not one
    is None, or missing from its list or dict.
    """
    if not isinstance(data, dict):
        return None
    record: Any = kind
    values: dict[str, Any] = {}
    for name, key, default, check, read in _readers(record):
        if key in data:
            value = data[key]
            if not check(value):
                return None
            values[name] = value if read is None else read(value)
        elif default is _WRONG:
            return None
        elif default is not MISSING:
            values[name] = default
    return kind(**values)


def encoded(record: Any) -> dict[str, Any]:
    """Return a dataclass as JSON."""
    return {_key(part): _plain(getattr(record, part.name)) for part in fields(record)}


def _key(part: Field[Any]) -> str:
    return str(part.metadata.get(JSON_KEY, part.name))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return encoded(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@cache
def _readers(kind: type[Any]) -> list[tuple[str, str, Any, _Check, Callable[[Any], Any] | None]]:
    """Return the name, the key, the default, and ``_reader`` of each field. Made once, like ``_check_of``."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (part.name, _key(part), _default(part, hints[part.name]), *_reader(hints[part.name]))
        for part in fields(kind)
    ]


def _default(part: Field[Any], hint: Any) -> Any:
    if part.default is not MISSING or part.default_factory is not MISSING:
        return MISSING
    return None if NoneType in get_args(hint) else _WRONG


def _reader(hint: Any) -> tuple[_Check, Callable[[Any], Any] | None]:
    """Return the check of a field's value, and the function that converts it; None: it is kept."""
    if hint is Path:
        return _check_of(str), Path
    nested = next((member for member in get_args(hint) if is_dataclass(member)), None)
    if nested is None:
        return _check_of(hint), None
    record: type[Any] = nested  # type: ignore[assignment]
    if get_origin(hint) is dict:
        return _check_of(dict[str, dict[str, Any]]), lambda value: {
            key: item for key, data in value.items() if (item := decoded(record, data)) is not None
        }
    if get_origin(hint) is not list:
        return _check_of(Any), lambda value: decoded(record, value)
    return _check_of(list[dict[str, Any]]), lambda value: [
        item for data in value if (item := decoded(record, data)) is not None
    ]


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
    if get_origin(kind) is Annotated:
        base, *checks = get_args(kind)
        is_base = _check_of(base)
        return lambda value: is_base(value) and all(check(value) for check in checks)
    if get_origin(kind) is Literal:
        return lambda value: type(value) is str and value in get_args(kind)
    plain: dict[Any, _Check] = {
        Any: lambda value: True,
        NoneType: lambda value: value is None,
        float: lambda value: (type(value) is float and math.isfinite(value)) or _is_int(value),
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


def _is_int(value: object) -> bool:
    return type(value) is int and -_MAX_INT < value < _MAX_INT
