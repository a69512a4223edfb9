"""Follows answers literally: changes an experiment file as the remedy of a problem says, as a user would."""

from __future__ import annotations

import json
import re
from typing import Any

from hpc_train.experiment.config.keys import BadKeyError, all_keys, known_keys, split_key
from hpc_train.experiment.config.marked_yaml import read_document, read_value
from hpc_train.experiment.config.problems import KeyPath, ProblemLine

#: End of the text to write, outside of quotes and brackets.
_ENDS = (
    "; ", ", or ", ", and ", ", like ", ", with ", ", which ", " (", " in place of", " in its place",
    " without quotes", " below ", " on line", " for a",
)  # fmt: skip
_LINE = re.compile(r"[^ ]*?:(\d+):(\d+): (.*)", re.DOTALL)


def followed(text: str, line: ProblemLine) -> str:
    """Return the text of the file after the remedy of the first problem was followed."""
    match = _LINE.fullmatch(line)
    assert match, line
    number, column, rest = int(match[1]), int(match[2]), match[3]
    remedy = rest.removeprefix(f"{line.key}: ").partition("; ")[2]
    if line.code.startswith("yaml."):
        return _edited(text, line.code, number, column, remedy)
    data = read_document(text.encode()).data
    assert data is not None, line
    is_on_key = (
        line.code in _ON_KEY
        or "takes no argument" in rest
        or "in its place" in remedy
        or "is not allowed here" in rest
    )
    _apply(data, _path(data, line.key), is_on_key, remedy)
    return json.dumps(data)


def _edited(text: str, code: str, number: int, column: int, remedy: str) -> str:
    """Return the text with a change of its lines."""
    lines = text.split("\n")
    if "tabs" in remedy:
        return text.replace("\t", "  ")
    if remedy.startswith("take the comma"):
        lines[number - 1] = lines[number - 1].rstrip(", ")
    elif remedy.startswith("write a space"):
        lines[number - 1] = lines[number - 1].replace("\t", " ")
    elif " in quotes if it is text" in remedy:
        lines[number - 1] = _literal(remedy.removeprefix("write "))
    elif code == "yaml.no-value":
        before, after = lines[number - 1][: column - 1], lines[number - 1][column - 1 :]
        written = _literal(remedy.removeprefix("write "))
        if not re.match(r"\w+\s*=", after):
            written = re.sub(r"^[\w.]+: ", "", written)
        elif before.endswith("{"):
            before, written = before.removesuffix("{"), f"{{{written}"
        if before.endswith("{") and not written.startswith("{"):  # the braces of a set
            before, after = before.removesuffix("{"), after.replace("}", "", 1)
        lines[number - 1] = before + written + re.sub(r"^.*?(?=, *[\w.]+:|\}|$)", "", after)
    elif match := re.match(r"write ([\w.]+): (\S+?)(?:,.*)?( on line (\d+))?(, with.*)?$", remedy):
        index = int(match[4] or number) - 1
        lines[index] = re.sub(
            rf"\b{match[1]}\s*[:=：]\s*[\w.,]*(?=[,}}]|$)", f"{match[1]}: {match[2]}", lines[index]
        )
    elif match := re.match(r"indent line (\d+) like line (\d+)", remedy):
        odd, like = int(match[1]) - 1, int(match[2]) - 1
        lines[odd] = " " * (len(lines[like]) - len(lines[like].lstrip())) + lines[odd].lstrip()
    elif match := re.match(r"indent lines? (\d+)(?:-(\d+))? below", remedy):
        for index in range(int(match[1]) - 1, int(match[2] or match[1])):
            lines[index] = "  " + lines[index]
    elif match := re.match(r"close the (?:mapping with (})|list with (\])|(quote))", remedy):
        quote = lines[number - 1][column - 1]
        lines[number - 1] += match[1] or match[2] or quote
    elif match := re.match(r"put a (comma before|colon after) (\w+) on line (\d+)", remedy):
        index = int(match[3]) - 1
        old, new = (f" {match[2]}", f", {match[2]}") if "comma" in match[1] else (match[2], f"{match[2]}:")
        lines[index] = lines[index].replace(old, new, 1)
    elif match := re.match(r"take the - out of line (\d+)", remedy):
        lines[int(match[1]) - 1] = lines[int(match[1]) - 1].replace("- ", "", 1)
    elif remedy.startswith("keep one of them"):
        del lines[number - 1]
    elif remedy.startswith("write the value itself"):
        lines[number - 1] = re.sub(r"\$\{.*?\}", "0.1", lines[number - 1])
    elif remedy.startswith("take the tag out"):
        lines[number - 1] = re.sub(r"!\S+ ?", "", lines[number - 1])
    else:
        raise AssertionError(f"can't be followed: {remedy}")
    return "\n".join(lines)


def _path(data: Any, key: str) -> list[Any]:
    """Return the path of a dotted key, whose segments may have dots themselves."""
    path: list[Any] = []
    while key:
        if index := re.match(r"\[(\d+)\]\.?", key):
            path.append(int(index[1]))
            data, key = data[int(index[1])], key[index.end() :]
            continue
        names = data if isinstance(data, dict) else ()
        begins = [name for name in names if re.match(re.escape(name) + r"(\.|\[|$)", key)]
        name = max(begins, key=len) if begins else re.match(r"[^.\[]+|.+", key)[0]  # type: ignore[index]
        path.append(name)
        key = key.removeprefix(name).removeprefix(".")
        data = data.get(name) if isinstance(data, dict) else None
    return path


def _apply(data: Any, path: list[Any], is_on_key: bool, remedy: str) -> None:
    if remedy.startswith(("take it out", "take one of the two out", "take it out of the grid", "omit it")):
        _delete(data, path)
        return
    if match := re.match(r"did you mean '([^']+)'\?", remedy):
        _rename(data, path, match[1])
        return
    match = re.match(
        r"(?:write|did you mean|put it in quotes:|use) (?:a number like |the whole key path: )?(.*)", remedy
    )
    assert match, f"can't be followed: {remedy}"
    written = _literal(match[1])
    assert "…" not in written, remedy
    pairs, problems = read_value(f"{{{written}}}")
    if (
        not problems
        and isinstance(pairs, dict)
        and ": " in written
        and not written.startswith(("{", "[", '"'))
    ):
        below = re.search(r" below (\w+):", remedy)
        is_whole = path[0] == "program" and list(pairs) == path[-1:]  # its names are the user's own
        if is_on_key or is_whole or path[:2] == ["sweep", "grid"]:
            _delete(data, path)
        for key, item in pairs.items():
            _set(data, _target(path, key, below[1] if below else None), item)
    elif is_on_key:
        _rename(data, path, written)
    else:
        value, problems = read_value(written)
        assert not problems, remedy
        _set(data, path, value)


#: Codes of problems with a key, not with its value.
_ON_KEY = {"key.unknown", "key.name", "sweep.unknown-key"}


def _literal(text: str) -> str:
    """Return the text to write, without the rest of the sentence."""
    depth, quote = 0, ""
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        if depth == 0 and not quote and text.startswith(_ENDS, index):
            return text[:index]
    return text.removesuffix("?")


def _target(path: list[Any], key: str, below: str | None) -> list[Any]:
    """Return the path of a key that a remedy names: beside the problem's key, or from the top."""
    if below is not None:
        dotted = ".".join(map(str, path))
        sections = [
            list(each)
            for each in all_keys()
            if each[-1] == below and dotted.startswith(".".join(map(str, each)))
        ]
        return [*min(sections, key=len), key]
    if key in path[:-1]:  # a whole list, for a problem with one of its items
        return path[: path.index(key) + 1]
    parent: KeyPath = tuple(path[:-1])
    if parent[:2] == ("sweep", "grid") or parent[-1:] == ("parameters",):
        return [*parent, key]
    first = key.partition(".")[0]
    is_beside = first in known_keys(parent) or (parent and first not in known_keys(()))
    if is_beside:
        return [*parent, *key.split(".")]
    try:
        return list(split_key(key))
    except BadKeyError:
        return [*parent, key]


def _delete(data: Any, path: list[Any]) -> Any:
    """Delete the key, and sections that are then empty."""
    for segment in path[:-1]:
        data = data[segment]
    return data.pop(path[-1]) if isinstance(path[-1], int) else data.pop(path[-1], None)


def _rename(data: Any, path: list[Any], name: str) -> None:
    value = _delete(data, path)
    _set(data, _target(path, name, None), value)


def _set(data: Any, path: list[Any], value: Any) -> None:
    for segment in path[:-1]:
        if isinstance(segment, int):
            data = data[segment]
            continue
        if not isinstance(data.get(segment), dict | list):
            data[segment] = {}
        data = data[segment]
    last = path[-1]
    if isinstance(value, dict) and isinstance(last, str) and isinstance(data.get(last), dict):
        _merge(data[last], value)
    else:
        data[last] = value


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
