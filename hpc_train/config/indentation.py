"""Finds sections whose keys are not indented below them, which YAML reads as keys beside the section.

Each of those keys would be reported as unknown or as given twice, and no message would name the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hpc_train.config.keys import as_mapping, known_keys, node_at
from hpc_train.config.marked_yaml import GIVEN_TWICE
from hpc_train.config.problems import KeyPath, Marks, Place, Problem

#: A key beside the section, and where.
_Key = tuple[Place, str]


def with_unindented_sections(
    data: Mapping[str, Any], marks: Mapping[KeyPath, Marks], problems: Sequence[Problem]
) -> list[Problem]:
    """Return ``problems``; those that missing indentation causes are replaced by one per section."""
    found = list(problems)
    for section in _empty_sections(data):
        if section not in marks:  # of the command line
            continue
        following = _keys_after(section, marks, problems)
        keys = list(takewhile(_belonging_to(section, marks[section].key.column, problems), following))
        paths = {section, *((*section[:-1], key) for _, key in keys)}
        caused = [each for each in problems if each.path[: len(section)] in paths]
        if keys and caused:
            end = next((place for place, _ in following[len(keys) :]), None)
            first, last = keys[0][0].line, _last_line(section[:-1], keys[-1][0], end, marks)
            lines = f"line {first}" if first == last else f"lines {first}-{last}"
            found = [each for each in found if each not in caused]
            remedy = f"indent {lines} below {section[-1]}:"
            found.append(Problem(section, "is empty", remedy, on_key=True, code="yaml.indentation"))
    return found


def _empty_sections(data: Mapping[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys without a value that are mappings in the schema."""
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, dict):
            yield from _empty_sections(value, below)
        elif value is None and as_mapping(node_at(below) or {}):
            yield below


def _repeated(problems: Sequence[Problem]) -> list[tuple[Place, KeyPath]]:
    """Return the keys that are given once more, which have no marks."""
    return [(each.place, each.path) for each in problems if each.place and each.code == GIVEN_TWICE]


def _keys_after(section: KeyPath, marks: Mapping[KeyPath, Marks], problems: Sequence[Problem]) -> list[_Key]:
    """Return the keys beside ``section`` that follow it, in the order of the file."""
    parent, start = section[:-1], marks[section].key
    places = [*((mark.key, path) for path, mark in marks.items()), *_repeated(problems)]
    return sorted((place, str(path[-1])) for place, path in places if path[:-1] == parent and place > start)


def _belonging_to(section: KeyPath, column: int, problems: Sequence[Problem]) -> Callable[[_Key], bool]:
    """Return what tells whether a key in this column can be one of the section's own."""
    own, beside = set(known_keys(section)), set(known_keys(section[:-1]))
    twice = {path[-1] for _, path in _repeated(problems)}
    must_have_keys = any(each.path == section for each in problems)

    def belongs(key: _Key) -> bool:
        place, name = key
        is_known = name in own if own else name not in beside
        is_at_home = name in beside and name not in twice and not must_have_keys
        return place.column == column and is_known and not is_at_home

    return belongs


def _last_line(parent: KeyPath, last_key: Place, end: Place | None, marks: Mapping[KeyPath, Marks]) -> int:
    """Return the last line of the value of the key at ``last_key``, before ``end``."""
    inside = [
        mark.value.line
        for path, mark in marks.items()
        if path[: len(parent)] == parent and mark.key >= last_key and (end is None or mark.key < end)
    ]
    return max([last_key.line, *inside])
