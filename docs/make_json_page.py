"""Writes docs/json.md, what commands print with ``--json``: ``python -m docs.make_json_page``.

It is made of ``docs.json_shapes``: the types, and the comments above their fields. A test calls
``page`` to check that the file is up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from docs.json_shapes import SHAPES

PAGE = Path(__file__).with_name("json.md")
HEAD = """\
# JSON output

With `--json` a command prints one JSON object to stdout; messages go to stderr and exit codes are the same.
This is a contract: fields may be added, and `version` changes if one changes its meaning. NaN and infinity
are null. This page is generated from `docs.json_shapes` by `python -m docs.make_json_page`; tests
compare both with what the commands print. `hpc-train schema` prints the JSON Schema of the experiment file.
"""
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null", Any: "any value"}


def page() -> str:
    """Return the page."""
    commands: dict[Any, list[str]] = {}
    for command, shape in SHAPES.items():
        commands.setdefault(shape, []).append(f"`{command}`")
    parts = [
        f"## {', '.join(names)}\n\n{_section(shape, {'version': int})}" for shape, names in commands.items()
    ]
    nested = dict.fromkeys(each for shape in commands for each in _below(shape))
    parts += ["## Objects in these\n", *(f"### {_title(each)}\n\n{_section(each)}" for each in nested)]
    return "\n".join([HEAD, *parts])


def is_object(kind: Any) -> bool:
    """Tell whether a type is an object with fixed fields."""
    return is_typeddict(kind) or (isinstance(kind, type) and is_dataclass(kind))


def _below(shape: Any) -> Iterator[Any]:
    """Yield the objects in the fields of a shape, those in theirs after them."""
    for hint in get_type_hints(shape).values():
        for kind in _leaves(hint):
            if is_object(kind):
                yield kind
                yield from _below(kind)


def _leaves(hint: Any) -> Iterator[Any]:
    arguments = get_args(hint)
    yield from [leaf for each in arguments for leaf in _leaves(each)] if arguments else [hint]


def _title(kind: Any) -> str:
    return {"RunRow": "Run", "Left": "Budget"}.get(kind.__name__, str(kind.__name__).removesuffix("Json"))


def _section(shape: Any, first: Mapping[str, Any] | None = None) -> str:
    """Return the table of an object's fields; ``first``: those that ``put_json`` adds."""
    said = comments(shape)
    hints = {**(first or {}), **get_type_hints(shape)}
    rows = [f"| `{name}` | {words(hint)} | {said.get(name, '')} |" for name, hint in hints.items()]
    head = "| field | value | meaning |\n| --- | --- | --- |"
    return "\n".join([f"{_plain(inspect.getdoc(shape) or '')}\n", head, *rows, ""])


def words(hint: Any) -> str:
    """Return a type in the words of JSON."""
    arguments = get_args(hint)
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(map(words, arguments))
    if get_origin(hint) is list:
        return f"list of {words(arguments[0])}"
    if get_origin(hint) is dict:
        return f"object: {words(arguments[1])} by name"
    if isinstance(hint, type) and issubclass(hint, str):
        return "string"
    if is_object(hint):
        return f"[{_title(hint)}](#{_title(hint).lower()})"
    return _NAMES[hint]


def comments(shape: Any) -> dict[str, str]:
    """Return the text of the ``#:`` lines above each field."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in inspect.getsource(shape).splitlines():
        if comment := re.fullmatch(r"\s+#: (.*)", line):
            lines.append(comment[1])
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]] = _plain(" ".join(lines))
            lines = []
    return found


def _plain(text: str) -> str:
    """Return a comment as Markdown, with JSON's word for None."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split())).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
