"""Compares what a command printed with its type in ``docs.json_shapes``."""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from docs.json_shapes import SHAPES
from docs.make_json_page import is_object
from hpc_train.console import JSON_VERSION


def checked(command: str, text: str) -> Any:
    """Return the printed object; fails, with the place, where it is not of the command's type."""
    data = json.loads(text)
    assert data["version"] == JSON_VERSION and next(iter(data)) == "version"
    # `put_json` adds it to objects without the field.
    added = {"version"} - get_type_hints(SHAPES[command]).keys()
    problems = list(
        _problems({key: value for key, value in data.items() if key not in added}, SHAPES[command], "$")
    )
    assert not problems, problems
    return data


def _problems(value: object, hint: Any, place: str) -> list[str]:
    """Return where ``value`` is not of the type, fields that are missing or unknown included."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, UnionType}:
        return [] if any(not _problems(value, each, place) for each in arguments) else [f"{place}: {hint}"]
    if origin is list and isinstance(value, list):
        return [
            found
            for at, each in enumerate(value)
            for found in _problems(each, arguments[0], f"{place}[{at}]")
        ]
    if origin is dict and isinstance(value, dict):
        return [
            found for at, each in value.items() for found in _problems(each, arguments[1], f"{place}.{at}")
        ]
    if is_object(hint) and isinstance(value, dict):
        fields = get_type_hints(hint)
        wrong = [f"{place}: fields {sorted(fields.keys() ^ value.keys())}"] * (fields.keys() != value.keys())
        known = fields.keys() & value.keys()
        return wrong + [found for at in known for found in _problems(value[at], fields[at], f"{place}.{at}")]
    if hint is Any or (hint is NoneType and value is None):
        return []
    hint = str if isinstance(hint, type) and issubclass(hint, str) else hint
    kinds = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}.get(hint, ())
    fits = isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))
    return [] if fits else [f"{place}: {value!r} is not {hint}"]
